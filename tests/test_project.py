"""What holds for the whole tree: versions, directions of import, names. STYLE and ARCHITECTURE.md say why."""

import ast
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = ("gateway", "compression", "engines", "migrations")
HTTP_CLIENTS = {"httpx", "httpx2", "aiohttp", "requests", "urllib3", "urllib.request", "http.client", "httpcore"}
UNSAFE_LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
NAMES_NOT_USED = ("Manager", "Helper", "Helpers", "Util", "Utils", "Service", "Handler", "Data")
LONG_FILE_LINES = 300
SETUPS = ("scripts/setup.py", "Makefile")


def sources(*rooms: str) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms or ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            yield path, ast.parse(path.read_text(), str(path))


def imported(tree: ast.Module) -> set[str]:
    """Every dotted name that is imported, with all its parents, wherever in the file."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {".".join(name.split(".")[: end + 1]) for name in names for end in range(name.count(".") + 1)}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_python_is_pinned_below_3_14_which_took_the_name_compression() -> None:
    assert PROJECT["project"]["requires-python"] == ">=3.11,<3.14"


def test_torch_is_in_no_base_dependency_and_pinned_in_the_engine_extra() -> None:
    from scripts.setup import TORCH

    base = {re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0].lower() for line in PROJECT["project"]["dependencies"]}
    assert not base & {"torch", "accelerate", "safetensors", "triton"}
    assert f"torch=={TORCH}" in PROJECT["project"]["optional-dependencies"]["engine"]


def test_each_http_client_is_imported_in_one_module() -> None:
    """aiohttp towards the engines, where its CPU counts; httpx for the commands that are clients of a gateway."""
    importers = {relative(path): imported(tree) & HTTP_CLIENTS for path, tree in sources()}
    found = {path: clients for path, clients in importers.items() if clients}
    assert found == {"engines/remote/http.py": {"aiohttp"}, "gateway/client.py": {"httpx"}}


def test_torch_is_imported_only_below_engines_local() -> None:
    importers = [relative(path) for path, tree in sources() if "torch" in imported(tree)]
    assert [path for path in importers if not path.startswith("engines/local/")] == []


def test_nothing_is_unpickled() -> None:
    for path, tree in sources():
        assert not imported(tree) & UNSAFE_LOADERS, relative(path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "numpy.load", "np.load"):
                safe = [word for word in node.keywords if word.arg in ("weights_only", "allow_pickle")]
                assert safe, f"{relative(path)}:{node.lineno} says neither weights_only nor allow_pickle"
                expected = {"weights_only": True, "allow_pickle": False}
                assert all(ast.literal_eval(word.value) is expected[str(word.arg)] for word in safe)


def test_class_names_say_what_a_thing_is() -> None:
    bad = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.strip("_").endswith(NAMES_NOT_USED)
    ]
    assert bad == []


def test_no_error_is_caught_and_dropped() -> None:
    """`except Exception: pass`, in whatever spelling."""
    bad = [
        f"{relative(path)}:{node.lineno}"
        for path, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
        and all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
    ]
    assert bad == []


def test_every_module_says_what_it_is() -> None:
    assert [relative(path) for path, tree in sources() if not ast.get_docstring(tree)] == []


def test_long_files_are_named() -> None:
    """A soft bound: a file past it is reported, one past twice of it fails."""
    lengths = {relative(path): len(path.read_text().splitlines()) for path, _ in sources()}
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for path, lines in lengths.items():
            if lines > LONG_FILE_LINES:
                warnings.warn(f"{path} has {lines} lines", stacklevel=1)
    assert [path for path, lines in lengths.items() if lines > 2 * LONG_FILE_LINES] == []


def test_the_bar_of_coverage_stays_where_it_is() -> None:
    coverage = PROJECT["tool"]["coverage"]
    assert coverage["report"]["fail_under"] >= 90
    assert set(coverage["run"]["source"]) >= {"gateway", "compression"}
    assert "omit" not in coverage["run"]
    assert "omit" not in coverage["report"]
    ci = (ROOT / ".ci" / "run").read_text()
    assert "coverage report" in ci
    assert "fail-under" not in ci


def test_ci_runs_make_test_as_the_readme_names_it() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^PYTEST_ADDOPTS=.*step 'make test' make test$", ci, re.MULTILINE)
    assert "step 'static checks' make check" in ci


@pytest.mark.parametrize("path", SETUPS)
def test_the_environment_is_made_by_the_standard_library_alone(path: str) -> None:
    if path.endswith(".py"):
        names = {name.split(".")[0] for name in imported(ast.parse((ROOT / path).read_text()))}
        import sys

        assert names <= sys.stdlib_module_names
    else:
        assert "scripts/setup.py" in (ROOT / path).read_text()
