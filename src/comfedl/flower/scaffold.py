"""A new app for Flower: what ``comfedl flower new`` writes."""

from __future__ import annotations

from pathlib import Path

from comfedl.flower.app_folder import write_app

SERVER = '''\
"""The server: trains as config.toml says, over the sites that are connected."""

from pathlib import Path

from comfedl.flower import server_app

app = server_app(config=Path(__file__).parent / "config.toml")
'''

CLIENT = '''\
"""A site: does what the method asks of a client, on the data that ``load_my_site`` gives. The data stay here."""

from comfedl.flower import client_app
from PACKAGE.data import load_my_site

app = client_app(data=load_my_site)
'''

DATA = '''\
"""The one function that is yours: this site's data. It runs at the site, for every message, in a fresh process."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import comfedl as cf

PARTS = 20  # of the example


def load_my_site(node: Mapping[str, Any]) -> cf.FederatedData:
    """The data of this site, as a FederatedData of one client whose name is the site's.

    ``node`` holds what the SuperNode was started with (--node-config), here the keys ``site`` and ``folder``.
    """
    # An example that runs: of scikit-learn's handwritten digits a part for every name. Replace it by your own: x with
    # the samples first, y with a whole number from 0 for each of them, such as
    #     arrays = numpy.load(Path(str(node["folder"])) / "samples.npz")
    #     return cf.FederatedData(train={name: (arrays["x"], arrays["y"])})
    name = str(node["site"])
    fed = cf.load("digits", partition=cf.partition.Dirichlet(clients=PARTS, alpha=0.5), seed=0)
    part = fed.names[crc32(name.encode()) % PARTS]
    return cf.FederatedData(train={name: fed.train[part]}, validation={name: fed.validation[part]})
'''

CONFIG = """\
# The same keys as for "comfedl run"; only [data] is of another kind, since the data are at the sites.
rounds = 50
seed = 0

[data]
name = "sites"
classes = 10

[model]
name = "logistic"

[algorithm]
name = "comfedl"
outer = { name = "kl", gamma = 0.2 }

[flower]
sites = 3          # how many there must be to begin, or their names: ["north", "south", "west"]
deadline = 600.0   # seconds that a site has for a round; whoever takes longer is left out of it
patience = 3600.0  # seconds to wait for the sites at the start
"""

README = """\
# PACKAGE: federated learning over our sites

`PACKAGE/data.py` holds the one function to fill in, `load_my_site`; `PACKAGE/config.toml` says what is trained. All
need Python 3.11 or later with `pip install 'comfedl[flower]'`; then no site installs anything at run time.

## Keys, once

    comfedl flower certs keys --sites north,south,west --hosts server.example.org

`ca.crt` goes to everybody, `server.pem` and `server.key` to the server, each `NAME.key` to its site alone, and each
`NAME.pub` to the server. `ca.key` is locked away. For more than a trial let your own authority sign the server's
certificate, and let each site make its own key: `ssh-keygen -t ecdsa -b 384 -f north.key -N ''`.

## The server

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
    flower-superlink --host 0.0.0.0 --port 8000 \\
        --ssl-ca-certfile keys/ca.crt --ssl-certfile keys/server.pem --ssl-keyfile keys/server.key \\
        --enable-supernode-auth --database superlink.db --disable-runtime-dependency-installation

In `~/.flwr/config.toml` of whoever starts runs (`FLWR_HOME` says another folder):

    [superlink.ours]
    address = "server.example.org:8000"
    root-certificates = "keys/ca.crt"

Then, once for every site:

    flwr supernode register keys/north.pub ours

## A site

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
    flower-supernode --superlink server.example.org:8000 --root-certificates ca.crt \\
        --auth-supernode-private-key north.key --host 127.0.0.1 --port 9094 \\
        --node-config 'site="north" folder="/data/north" state="/var/lib/comfedl"'

`state` is the folder for what the method keeps at the site between rounds. Start the SuperNode from a service manager
that starts it again when it ends: after a power cut it is refused for about a minute, until the server has noticed.

## A run

    flwr run . ours --stream -c 'out="/srv/runs/first"'

The run's folder is on the server's machine. A run that was stopped goes on from its last round:

    flwr run . ours --stream -c 'out="/srv/runs/first" resume=true'

`sites.jsonl` in that folder says who answered in which round, and why the others did not.
"""


def new_app(folder: Path) -> None:
    """Write a complete app; its name is the folder's."""
    files = {
        "README.md": README,
        "PACKAGE/__init__.py": "",
        "PACKAGE/server.py": SERVER,
        "PACKAGE/client.py": CLIENT,
        "PACKAGE/data.py": DATA,
        "PACKAGE/config.toml": CONFIG,
    }
    write_app(folder, folder.resolve().name, files)
