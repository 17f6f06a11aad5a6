"""Where the time of a round over Flower goes: from the server's message to the answer, by phase, in one run.

    python -m benchmarks.flower_phases [--rounds 6] [--sites 3] [--name after] [--out results/benchmarks]

Sites and server of a local trial (``comfedl flower local``: a SuperLink and SuperNodes with TLS and keys) write down
when each phase of each message ends, by the clock and in seconds of the client process's own CPU time. Waiting shows in
the first and not in the second, so that the second can be compared between runs on a busy machine. Medians over sites
and rounds, without the first round, go to ``flower-phases.json`` under the given name, next to those of other names,
and to ``flower-phases.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.flower import MODELS, config
from benchmarks.peers.report import machine, machine_line
from comfedl.flower.local_trial import LocalTrial

ROOT = Path(__file__).resolve().parents[1]

CLIENT = """\
import json, os, time

began = time.time(), time.process_time()

from comfedl.flower import client_app
from comfedl.flower.site_file import load_site

imported = time.time(), time.process_time()
read = None


def load(node):
    global read
    found = load_site(node)
    read = time.time(), time.process_time()
    return found


def timed(message, context, call):
    called = time.time(), time.process_time()
    reply = call(message, context)
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = float(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        start = time.time() - float(uptime.read().split()[0]) + ticks
    points = {"start": (start, 0.0), "app": began, "imported": imported, "called": called, "read": read}
    points["done"] = time.time(), time.process_time()
    line = {"node": context.node_id, "group": message.metadata.group_id, "points": points}
    with open(str(context.node_config["data"]) + ".phases", "a") as file:
        file.write(json.dumps(line) + "\\n")
    return reply


app = client_app(load, mods=[timed])
"""

SERVER = """\
import json, time

from comfedl.flower import engine, server_app

exchange = engine.exchange


class Timed:
    def __init__(self, grid, file, group):
        self.grid, self.file, self.group, self.pushed = grid, file, group, (0.0, 0.0)

    def push_messages(self, messages):
        start = time.time()
        names = list(self.grid.push_messages(messages))
        self.pushed = start, time.time()
        return names

    def pull_messages(self, names):
        replies = list(self.grid.pull_messages(names))
        for reply in replies:
            line = {"node": reply.metadata.src_node_id, "group": self.group}
            self.file.write(json.dumps({**line, "pushed": self.pushed, "pulled": time.time()}) + "\\n")
        return replies


def timed(grid, contents, kind, group, *more):
    with open(FILE, "a") as file:
        return exchange(Timed(grid, file, group), contents, kind, group, *more)


engine.exchange = timed
app = server_app()
"""

# The phases: the point at which each one ends, and whose it is.
PHASES = {
    "message sent": ("pushed", "network"),
    "picked up by the SuperNode, and a process started for it": ("start", "Flower, whose SuperNode polls every 3 s"),
    "the process's own start, with Flower's imports": ("app", "Python and Flower"),
    "imports of torch and comfedl": ("imported", "torch and comfedl"),
    "message fetched": ("called", "Flower"),
    "data read": ("read", "yours"),
    "training and evaluation": ("done", "comfedl"),
    "answer back at the server": ("pulled", "Flower polls every 0.5 s, comfedl as well"),
}


def measure(rounds: int, sites: int) -> dict[str, Any]:
    """The points of every message but the first round's."""
    settings = config(MODELS["logistic"], rounds, sites)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial = LocalTrial(settings, sites, folder, folder / "run", CLIENT)
        server = folder / "app" / "comfedl_trial" / "server.py"
        server.write_text(SERVER.replace("FILE", repr(str(folder / "server.phases"))))
        with trial.daemons:
            trial.start_link()
            for site in trial.sites:
                trial.start_node(site)
            trial.wait(trial.submit(), poll=lambda: None)
        arrived = {(row["node"], row["group"]): row for row in rows(folder / "server.phases")}
        found = [row for site in trial.sites for row in rows(folder / f"{site}.safetensors.phases")]
    messages = []
    for row in found:
        if row["group"] not in ("who", "round 1"):
            at_server = arrived[row["node"], row["group"]]
            sent, pushed = at_server["pushed"]
            points = {**row["points"], "pushed": (pushed, None), "pulled": (at_server["pulled"], None)}
            messages.append({"sent": sent, "group": row["group"], "points": points})
    return {"messages": messages, "phases": summary(messages)}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summary(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Each phase's median seconds by the clock, and of the process's CPU time."""
    found: dict[str, Any] = {}
    for phase, (point, _) in PHASES.items():
        clock, cpu = [], []
        for message in messages:
            before = ["sent", *(end for end, _ in PHASES.values())]
            last = before[before.index(point) - 1]
            start = (message["sent"], None) if last == "sent" else message["points"][last]
            end = message["points"][point]
            clock.append(end[0] - start[0])
            if end[1] is not None and start[1] is not None:
                cpu.append(end[1] - start[1])
        found[phase] = {"clock": statistics.median(clock), "cpu": statistics.median(cpu) if cpu else None}
    whole = [message["points"]["pulled"][0] - message["sent"] for message in messages]
    longest: dict[str, float] = {}
    for message, seconds in zip(messages, whole, strict=True):
        longest[message["group"]] = max(seconds, longest.get(message["group"], 0))
    cpu = [message["points"]["done"][1] for message in messages]
    found["a message, in all"] = {"clock": statistics.median(whole), "cpu": statistics.median(cpu)}
    found["a round: its slowest message"] = {"clock": statistics.median(longest.values()), "cpu": None}
    return found


def page(found: dict[str, Any]) -> str:
    names = list(found)
    count = {name: len(each["messages"]) for name, each in found.items()}
    lines = ["Seconds of a message to a site, by phase: by the clock, and of the client process's CPU time.", ""]
    lines.append("| phase | whose |" + "".join(f" {name}: clock | {name}: CPU |" for name in names))
    lines.append("|---|---|" + "---|---|" * len(names))
    for phase in found[names[0]]["phases"]:
        whose = PHASES[phase][1] if phase in PHASES else ""
        cells = ""
        for name in names:
            each = found[name]["phases"][phase]
            cells += f" {each['clock']:.2f} | {'' if each['cpu'] is None else format(each['cpu'], '.2f')} |"
        lines.append(f"| {phase} | {whose} |{cells}")
    lines.append("")
    for name in names:
        lines.append(f"{name}: medians of {count[name]} messages. {machine_line(found[name]['machine'])}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a round over Flower goes.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--name", default="now", help="under which the numbers are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "benchmarks")
    given = parser.parse_args()
    path = given.out / "flower-phases.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    where = machine(ROOT, torch.__version__, None)
    measured = measure(given.rounds, given.sites)
    where["load_at_end"] = os.getloadavg()
    found = {**kept, given.name: {"machine": where, **measured}}
    path.write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "flower-phases.md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
