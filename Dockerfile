# A Flower SuperLink, or a SuperNode, with comfedl installed. docs/install.md shows how to run them.
#
#   docker build --target superlink -t comfedl-superlink .
#   docker build --target supernode -t comfedl-supernode .
#
# Build arguments:
#   PYTHON       3.11 (default), 3.12 or 3.13
#   EXTRAS       comfedl's extras, without spaces: flower (default), or for instance flower,images
#   TORCH_INDEX  the address of PyTorch's index of CPU builds (pytorch.org names it under "Get started"). Without it the
#                images have pip's default build, which on Linux brings several gigabytes of CUDA.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG EXTRAS=flower
ARG TORCH_INDEX=
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY reproduction reproduction
COPY experiments experiments
RUN python -m venv /opt/comfedl \
    && /opt/comfedl/bin/pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} -c constraints.txt ".[${EXTRAS}]"

FROM python:${PYTHON}-slim-bookworm AS base
RUN useradd --uid 10001 --user-group --create-home --home-dir /var/lib/comfedl comfedl
COPY --from=build /opt/comfedl /opt/comfedl
# Flower starts its own programs by name, and must neither install packages at run time nor report home.
ENV PATH=/opt/comfedl/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    FLWR_HOME=/var/lib/comfedl/flwr \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
USER 10001:10001
WORKDIR /var/lib/comfedl
VOLUME /var/lib/comfedl
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s CMD ["python", "-c", "import grpc\nfrom grpc_health.v1 import health_pb2, health_pb2_grpc\nstub = health_pb2_grpc.HealthStub(grpc.insecure_channel('127.0.0.1:8081'))\nassert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == health_pb2.HealthCheckResponse.SERVING"]

# The server: keys/ of `comfedl flower certs` is mounted at /keys.
FROM base AS superlink
EXPOSE 8000
ENTRYPOINT ["flower-superlink", "--host", "0.0.0.0", "--port", "8000", "--health-server-address", "127.0.0.1:8081", "--disable-runtime-dependency-installation"]
CMD ["--ssl-ca-certfile", "/keys/ca.crt", "--ssl-certfile", "/keys/server.pem", "--ssl-keyfile", "/keys/server.key", "--enable-supernode-auth", "--database", "/var/lib/comfedl/superlink.db"]

# A site: opens connections to the SuperLink only, and listens to nobody outside its container.
FROM base AS supernode
ENTRYPOINT ["flower-supernode", "--host", "127.0.0.1", "--port", "9094", "--health-server-address", "127.0.0.1:8081", "--root-certificates", "/keys/ca.crt"]
CMD ["--help"]
