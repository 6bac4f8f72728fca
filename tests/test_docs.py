"""The documentation is true: its code runs, the files and tests it names exist, the errata it lists are errata."""

import ast
import contextlib
import doctest
import io
import itertools
import linecache
import re
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from minimand.functions import L1, LogBarrier, LogBox, SquaredHinge, from_activation
from minimand.operators import Dense
from minimand.solvers import FISTA, RCD, Nice, Problem, solve
from minimand.solvers.sampling import Request

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.rst"))
MARKDOWN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _name(path: Path) -> str:
    return path.name


def _rst_blocks(text: str) -> list[str]:
    """The bodies of ``.. code-block:: python``."""
    found = re.finditer(r"^( *)\.\. code-block:: python\n((?:\1 +:.*\n)*)((?:\n|\1 +.*\n?)*)", text, re.MULTILINE)
    return [textwrap.dedent(match[3]) for match in found]


def _fenced_blocks(text: str) -> list[str]:
    """The bodies of fenced python blocks, those in lists included."""
    found = re.finditer(r"^( *)```(?:python|pycon)\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(match[2]) for match in found]


def _output_after(node: ast.stmt, lines: list[str]) -> str:
    """The output in a comment ``# → …`` at the end of a statement, or in the comment lines below it."""
    end = node.end_lineno or 0
    if found := re.search(r"# → (.*)", lines[end - 1]):
        return found[1]
    below = itertools.takewhile(lambda line: line.startswith("#"), lines[end:])
    text = "\n".join(line[1:] for line in below)
    return text.replace("→", "", 1) if text.startswith(" →") else ""


def _execute(block: str, names: dict[str, object], where: str) -> None:
    """Run a block without prompts; outputs in comments must be those of the statement before them."""
    lines = block.splitlines()
    linecache.cache[where] = len(block), None, block.splitlines(True), where  # as notebooks do
    for node in ast.parse(block).body:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            if isinstance(node, ast.Expr):
                value = eval(compile(ast.Expression(node.value), where, "eval"), names)
                if value is not None:
                    print(repr(value))
            else:
                exec(compile(ast.Module([node], []), where, "exec"), names)
        if wanted := _output_after(node, lines):
            message = f"{where}, line {node.lineno}: expected {wanted!r}, got {printed.getvalue()!r}"
            assert doctest.OutputChecker().check_output(wanted + "\n", printed.getvalue(), FLAGS), message


def _run(path: Path, blocks: list[str]) -> None:
    """Examples with a prompt must print what they say; plain blocks must run, all in one namespace."""
    names: dict[str, object] = {"__name__": "__docs__"}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for number, block in enumerate(blocks, 1):
        where = f"{path.name}, block {number}"
        if ">>>" not in block:
            _execute(block, names, where)
            continue
        report: list[str] = []
        test = parser.get_doctest(block, names, where, str(path), 0)
        result = runner.run(test, out=report.append, clear_globs=False)
        names = test.globs
        assert result.failed == 0, "".join(report)


# torch's exporter to ONNX uses its own deprecated names.
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_pages_run(path: Path) -> None:
    text = path.read_text()
    plain = [block for block in _rst_blocks(text) if ">>>" not in block]
    _run(path, [*plain, text] if ">>>" in text else plain)


@pytest.mark.parametrize("path", MARKDOWN, ids=_name)
def test_markdown_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _run(path, _fenced_blocks(path.read_text()))


def test_the_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_every_import_of_the_readmes_table_works() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    imports = [found for row in rows for found in re.findall(r"`(from [\w.]+ import [\w, ]+)`", row)]
    assert len(imports) > 12
    for statement in imports:
        exec(compile(statement, "README.md", "exec"), {})


def test_the_readmes_first_example_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """Words to the letter, numbers within 5 %, except the measured times."""
    text = (ROOT / "README.md").read_text()
    code = _fenced_blocks(text)[0]
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "__docs__"})
    number = re.compile(r"\(?(\d[\d.e+]*)[)%]*")
    seconds = re.compile(r"[\d.e-]+ s\b")
    texts = (seconds.sub("", text).split() for text in (shown, capsys.readouterr().out))
    for expected, printed in zip(*texts, strict=True):
        if (left := number.fullmatch(expected)) and (right := number.fullmatch(printed)):
            assert float(right[1]) == pytest.approx(float(left[1]), rel=0.05)
        elif not expected.endswith(("×", "─")):
            assert printed == expected


def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("path", [*PAGES, *MARKDOWN], ids=_name)
def test_named_files_and_tests_exist(path: Path) -> None:
    missing = []
    named = re.findall(
        r"`((?:src|papers|tests|examples|docs|benchmarks)/[\w./]*(?:\.\w+|/))(?:::(\w+))?[ `]", path.read_text()
    )
    for file, test in named:
        target = ROOT / file
        if not target.exists() or (test and test not in _functions(target)):
            missing.append(f"{file}::{test}" if test else file)
    assert not missing, f"{path.name} names what is not there: {missing}"


def test_the_lineage_page_names_enough_to_be_checked() -> None:
    """If the pattern above stopped matching, the law would hold of nothing."""
    text = (ROOT / "docs" / "lineage.rst").read_text()
    assert len(set(re.findall(r"``(?:papers/)?tests/\w+\.py::\w+``", text))) > 40
    propositions = [f"Proposition {k}" for k in range(1, 7)]
    for item in ("Table 1", "Lemma 1", "Lemma 2", *propositions, "eq. 3,", "eq. 5", "eq. 31", "eq. 32"):
        assert item in text, item


# The errata of the lineage page that no other law shows.


def _objective(function: SquaredHinge, x: torch.Tensor, a: float) -> torch.Tensor:
    return function.values(x) + 0.5 * (x - a) ** 2


def test_erratum_leaky_sign() -> None:
    """[Bibi2019], Proposition 3: below −λ the prox is (a − γλ)/(1+γ); the source's (a + γλ)/(1+γ) is worse."""
    gamma, shift, a = 2.0, 0.5, -3.0
    function = SquaredHinge(gamma, shift)
    x = function.prox(torch.tensor(a, dtype=torch.float64))
    ours, source = (a - gamma * shift) / (1 + gamma), (a + gamma * shift) / (1 + gamma)
    assert float(x) == pytest.approx(ours)
    points = torch.tensor([ours, source], dtype=torch.float64)
    right, wrong = _objective(function, points, a)
    grid = _objective(function, torch.linspace(-4, 1, 5001, dtype=torch.float64), a).min()
    assert right <= grid + 1e-9
    assert wrong > right + 0.1


def test_erratum_prox_parameter_is_the_step() -> None:
    """[Bibi2019], eq. 7: unit steps with the prox of g/L settle away from the minimiser."""
    problem = Problem(Dense(1.2 * torch.eye(2).double()), L1(1.0), torch.tensor([[4.0, -3.0]]).double())
    smoothness = 1.2**2
    x = torch.zeros(1, 2).double()
    for _ in range(200):
        x = problem.prox(x + problem.descent(x, problem.linear()), 1 / smoothness)
    best = solve(problem, FISTA(iters=200)).x
    assert problem.optimality(best) < 1e-9
    settled = problem.prox(x + problem.descent(x, problem.linear()), 1 / smoothness)
    torch.testing.assert_close(settled, x)
    assert problem.optimality(x) > 0.1


def test_erratum_eq_32_proxes_the_whole_vector() -> None:
    """[Bibi2019], eq. 32: shrinking the entries that were not sampled, too, stops far from the optimum for L1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 8, generator=generator, dtype=torch.float64) / 8**0.5
    y = torch.randn(3, 8, generator=generator, dtype=torch.float64)
    problem = Problem(Dense(weight), L1(0.05), y, ridge=0.1)
    step = 1 / problem.smoothness()
    best, start = solve(problem, FISTA(iters=1000)).objective, problem.objective(torch.zeros(3, 6).double())
    x = torch.zeros(3, 6).double()
    for _ in range(2000):
        sample = Nice().draw(Request(1, 6, 3, y, generator)).weight > 0
        x = problem.prox(x + step * sample * problem.descent(x, problem.linear()), step)
    ours = solve(problem, RCD(iters=2000, tau=1), generator=generator)
    assert ours.objective - best < 1e-6 * (start - best)
    assert problem.objective(x) - best > 0.05 * (start - best)


@pytest.mark.parametrize(
    ("barrier", "act", "gamma", "error"), [(LogBarrier, "softplus", 1.0, 0.307), (LogBox, "tanh", 0.1, 0.060)]
)
def test_erratum_barriers_at_the_papers_weights(barrier: type, act: str, gamma: float, error: float) -> None:
    z = torch.linspace(-12, 12, 4801, dtype=torch.float64)
    worst = (barrier(gamma).prox(z) - from_activation(act).prox(z)).abs().max()
    assert float(worst) == pytest.approx(error, abs=1e-3)


def test_erratum_objective_table() -> None:
    """[Lin2019], table of objectives: ∫₀ᵗ of leaky ReLU is αt²/2 below zero, of softsign −t − log(1 − t)."""
    t = torch.linspace(-3, -0.1, 30, dtype=torch.float64, requires_grad=True)
    slope = 0.2
    table = {
        lambda t: 0.5 * slope * t**2: F.leaky_relu(t, slope),
        lambda t: -t - torch.log(1 - t): F.softsign(t),
    }
    for integral, activation in table.items():
        (derivative,) = torch.autograd.grad(integral(t).sum(), t)
        torch.testing.assert_close(derivative, activation)
    (source,) = torch.autograd.grad((0.5 * slope**2 * t**2).sum(), t)
    assert not torch.allclose(source, F.leaky_relu(t, slope))
    assert torch.allclose(from_activation("softsign").primitive(t.detach()), (-t - torch.log(1 - t)).detach())
