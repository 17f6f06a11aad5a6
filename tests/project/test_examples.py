"""The examples: each is run and prints what the gallery shows, and the two-level problems end at the right optima."""

from __future__ import annotations

import ast
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import comfedl as cf
from helpers import gallery, notebook
from helpers.pages import Shown, difference

ON_FLOWER = ("flower_local.py", "sites_with_a_csv_each.py")
DOWNLOADS = ("adult_as_it_comes.py", "lora.py")
SLOW = {
    **{name: [pytest.mark.slow] for name in ON_FLOWER},
    **{name: [pytest.mark.download] for name in DOWNLOADS},
}
LONGEST = 75  # lines
PAGE = gallery.PAGE.read_text(encoding="utf-8")
ROUNDS = re.compile(r"(?<=round )\d+|\d+(?= rounds)")  # when a run stops early: rounding may move it


def differ(written: str, printed: str) -> str:
    return difference(Shown(ROUNDS.sub("N", written), ROUNDS.sub("N", printed), 0))


@pytest.mark.parametrize(
    "script",
    [pytest.param(script, marks=SLOW.get(script.name, []), id=script.stem) for script in gallery.scripts()],
)
def test_an_example_prints_what_the_gallery_shows(script: Path) -> None:
    if script.name in ON_FLOWER:
        pytest.importorskip("flwr", reason="Flower is not installed: pip install 'comfedl[flower]'")
    if script.name == "lora.py":
        pytest.importorskip("peft", reason="peft is not installed: pip install 'comfedl[adapters]'")
    ended = gallery.run(script)
    assert ended.returncode == 0, ended.stderr
    if script.name not in SLOW:
        assert not ended.stderr  # no warning that would worry a newcomer
    assert not (wrong := differ(gallery.printed_in(PAGE)[script.name].written, ended.stdout)), wrong


def test_a_gallery_that_lies_is_caught() -> None:
    page = "```console\n$ python examples/a.py\nworst 0.75, 12 rounds\nbest round 3\n```\n"
    written = gallery.printed_in(page)["a.py"].written
    assert not differ(written, "worst 0.76, 13 rounds\nbest round 4\n")
    assert differ(written, "worst 0.85, 12 rounds\nbest round 3\n")
    assert differ(written, "worst 0.75, 12 rounds\n")


def test_the_gallery_has_every_example_by_its_first_line() -> None:
    linked = {found[2]: found[1] for found in gallery.LINK.finditer(PAGE)}
    assert linked.pop(gallery.NOTEBOOK)
    assert linked.pop(gallery.APP) and (gallery.EXAMPLES / gallery.APP).is_file()
    assert linked == {script.name: gallery.summary(script) for script in gallery.scripts()}
    assert gallery.printed_in(PAGE).keys() == linked.keys()


def test_the_list_beside_the_examples_is_the_gallery_s() -> None:
    assert gallery.README.read_text(encoding="utf-8") == gallery.listing(PAGE)


@pytest.mark.parametrize("script", gallery.scripts(), ids=lambda script: script.stem)
def test_an_example_is_short_and_says_for_whom_it_is(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    source = ast.parse(text)
    said = ast.get_docstring(source) or ""
    assert "\n\nFor anyone" in said and " Expect " in " ".join(said.split())
    assert len(text.splitlines()) <= LONGEST
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    imported = {node.module for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(source) if isinstance(node, ast.Import) for name in node.names}
    assert not {name.partition(".")[0] for name in imported if name} & {"helpers", "tests", "benchmarks"}


def load(name: str) -> dict[str, Any]:
    """What an example defines, without running it."""
    return runpy.run_path(str(gallery.EXAMPLES / f"{name}.py"))


def joined(problem: cf.Composition, params: dict[str, Tensor], fed: cf.FederatedData) -> Tensor:
    """The whole objective, the mean over clients of outer(inner(w)), in one piece."""
    return torch.stack([problem.outer(problem.inner(params, data), data) for data in fed.train.values()]).mean()


def portfolio() -> tuple[cf.Composition, dict[str, Tensor], cf.FederatedData]:
    example = load("portfolio")
    start = {"weights": torch.linspace(-0.2, 0.3, 5, dtype=torch.float64)}
    return cf.Composition(example["inner"], example["outer"]), start, cf.FederatedData(example["markets"]())


def fairness() -> tuple[cf.Composition, dict[str, Tensor], cf.FederatedData]:
    example, generator = load("fairness"), torch.Generator().manual_seed(0)
    weights = 0.3 * torch.randn(6, generator=generator, dtype=torch.float64)
    start = {"weights": weights, "bias": torch.tensor(0.1, dtype=torch.float64)}
    return example["penalised"](100.0), start, example["clinics"](0)


def pairwise_auc() -> tuple[cf.Composition, dict[str, Tensor], cf.FederatedData]:
    example, generator = load("pairwise_auc"), torch.Generator().manual_seed(0)
    train = {}
    for k in range(3):
        x = torch.randn(40 + 20 * k, 4, generator=generator, dtype=torch.float64)
        noise = torch.randn(len(x), generator=generator, dtype=torch.float64)
        train[f"client-{k}"] = (x, (x[:, 0] + 0.5 * k * x[:, 1] + noise > 1).double())
    model = nn.Linear(4, 1).double()
    start = {name: part.detach() for name, part in model.named_parameters()}
    return cf.Composition(partial(example["inner"], model), example["outer"]), start, cf.FederatedData(train)


PROBLEMS = {"portfolio": portfolio, "fairness": fairness, "pairwise_auc": pairwise_auc}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_gradient_is_autograd_s_of_the_joined_problem(name: str) -> None:
    problem, start, fed = PROBLEMS[name]()
    method = cf.ComFedL(problem=problem, lr=0.5, local_steps=1, batch_size=None)
    after = cf.fit(start, fed, method, rounds=1).params
    leaves = {key: part.clone().requires_grad_() for key, part in start.items()}
    direct = torch.autograd.grad(joined(problem, leaves, fed), list(leaves.values()))
    for key, gradient in zip(leaves, direct, strict=True):
        torch.testing.assert_close((start[key] - after[key]) / 0.5, gradient)
    assert max(float(gradient.abs().max()) for gradient in direct) > 0.01


def test_the_portfolio_ends_at_its_closed_form() -> None:
    problem, start, fed = portfolio()
    method = cf.ComFedL(problem=problem, lr=0.05, local_steps=1, batch_size=None)
    found = cf.fit(start, fed, method, rounds=300, eval_every=300).params["weights"]
    example = load("portfolio")
    torch.testing.assert_close(found, example["closed_form"](example["markets"]()), rtol=1e-6, atol=1e-9)


def test_the_pairwise_loss_is_the_mean_over_all_pairs_and_ends_at_fisher_s_direction() -> None:
    """The loss is quadratic in a linear score: (mean_i S_i) w = mean_i d_i, d the difference of the classes' means."""
    problem, start, fed = pairwise_auc()
    for x, y in fed.train.values():
        score = x @ start["weight"][0] + start["bias"]
        pairs = (1 - score[y == 1][:, None] + score[y == 0][None]) ** 2
        torch.testing.assert_close(problem.outer(problem.inner(start, (x, y)), (x, y)), pairs.mean())
    spread, apart = [], []
    for x, y in fed.train.values():
        one, other = x[y == 1], x[y == 0]
        apart.append(one.mean(dim=0) - other.mean(dim=0))
        spread.append(one.T.cov(correction=0) + other.T.cov(correction=0) + apart[-1].outer(apart[-1]))
    best = torch.linalg.solve(torch.stack(spread).mean(dim=0), torch.stack(apart).mean(dim=0))
    method = cf.ComFedL(problem=problem, lr=0.1, local_steps=1, batch_size=None)
    found = cf.fit(start, fed, method, rounds=300, eval_every=300).params["weight"][0]
    torch.testing.assert_close(found, best, rtol=1e-6, atol=1e-9)


def test_the_fair_model_is_as_good_as_a_central_solver_s() -> None:
    problem, start, fed = fairness()
    method = cf.ComFedL(problem=problem, **load("fairness")["WHOLE"])
    found = cf.fit(start, fed, method, rounds=400, eval_every=400).params
    leaves = {key: part.clone().requires_grad_() for key, part in start.items()}
    solver = torch.optim.LBFGS(
        list(leaves.values()), max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-9, tolerance_change=1e-12
    )

    def closure() -> Tensor:
        solver.zero_grad()
        value = joined(problem, leaves, fed)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(closure)
    central, federated = joined(problem, leaves, fed).item(), joined(problem, found, fed).item()
    assert federated == pytest.approx(central, abs=1e-8) and central < joined(problem, start, fed).item() - 0.1


def test_the_notebook_is_the_tutorial_and_prints_what_it_says() -> None:
    import nbformat

    saved = nbformat.read(notebook.NOTEBOOK, as_version=4)
    fresh = notebook.empty(notebook.PAGE.read_text(encoding="utf-8"))
    assert [(cell.cell_type, cell.source) for cell in saved.cells] == [
        (cell.cell_type, cell.source) for cell in fresh.cells
    ], "run: python tests/helpers/notebook.py"
    notebook.carry_out(fresh)
    prints = 0
    for shown, cell in zip(saved.cells, fresh.cells, strict=True):
        if cell.cell_type == "code":
            written, printed = notebook.printed(shown), notebook.printed(cell)
            assert not (wrong := difference(Shown(written, printed, 0))), wrong
            prints += "0." in printed
    assert prints >= 5


@pytest.mark.filterwarnings("ignore:.*tight_layout.*")
def test_the_demo_s_picture_can_be_drawn_again(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(gallery.ROOT / "docs" / "demo_picture.py"))
    drawn["main"](tmp_path / "pictures" / "demo.png", seeds=range(100, 102))
    assert (tmp_path / "pictures" / "demo.png").stat().st_size > 10_000
