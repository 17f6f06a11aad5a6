"""All code written for speed, behind one function: ``accelerate``.

Each kernel gives the results of the plain code, up to rounding, and must save at least 5 % of a round in one of the
benchmark's workloads (docs/performance.md). Nothing outside this package depends on its contents.
"""

from comfedl.engines.kernels.choice import VECTORIZE as VECTORIZE, Accelerated as Accelerated, accelerate as accelerate
