"""scripts/setup.py: which torch is chosen, and what is said when it cannot be had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.setup import CPU_INDEX, TORCH, SetupFailed, advice, choose_torch

ROOT = Path(__file__).parents[1]
MIRROR = "https://mirror.example/whl"


@pytest.mark.parametrize(
    ("system", "has_gpu", "torch_index", "build", "attempts"),
    [
        ("Linux", False, "", "CPU", [f"torch=={TORCH}+cpu", f"torch=={TORCH}+cpu --extra-index-url {CPU_INDEX}"]),
        ("Linux", True, "", "CUDA", [f"torch=={TORCH}"]),
        ("Linux", True, "cpu", "CPU", [f"torch=={TORCH}+cpu", f"torch=={TORCH}+cpu --extra-index-url {CPU_INDEX}"]),
        ("Linux", False, "cuda", "CUDA", [f"torch=={TORCH}"]),
        ("Linux", True, f"{MIRROR}/cpu", "CPU", [f"torch=={TORCH}+cpu --extra-index-url {MIRROR}/cpu"]),
        ("Linux", False, f"{MIRROR}/cu130", "CUDA", [f"torch=={TORCH} --extra-index-url {MIRROR}/cu130"]),
        ("Darwin", False, "", "macOS", [f"torch=={TORCH}"]),
    ],
)
def test_torch_is_the_cpu_build_without_a_gpu_and_the_cuda_build_with_one(
    system: str, has_gpu: bool, torch_index: str, build: str, attempts: list[str]
) -> None:
    choice = choose_torch(system, has_gpu, torch_index)
    assert choice.build == build
    assert [" ".join(attempt) for attempt in choice.attempts] == attempts


def test_a_torch_index_that_is_no_index_is_refused() -> None:
    with pytest.raises(SetupFailed, match="Set it to cpu, cuda or the URL"):
        choose_torch("Linux", False, "gpu")


@pytest.mark.parametrize(
    ("last_lines", "says"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("Failed to establish a new connection: Temporary failure in name resolution", "was not reached"),
        (f"ERROR: No matching distribution found for torch=={TORCH}+cpu", "PYTHON=python3.11"),
        ("ERROR: No matching distribution found for orjson>=99", "mirror may be old"),
        ("something else", "make clean"),
    ],
)
def test_a_failure_of_pip_says_what_to_do(last_lines: str, says: str) -> None:
    assert says in advice(last_lines)


def test_make_without_a_word_explains_the_words() -> None:
    told = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in ("serve", "test", "check", "prove", "model", "clean", "TORCH_INDEX", "PYTHON"):
        assert word in told


def test_without_a_python_that_fits_make_says_what_to_install(tmp_path: Path) -> None:
    for tool in ("make", "sh", "test", "echo"):
        (tmp_path / tool).symlink_to(
            next(Path(p, tool) for p in os.environ["PATH"].split(":") if Path(p, tool).exists())
        )
    done = subprocess.run(
        ["make", "serve"], cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)}
    )
    assert done.returncode != 0
    assert "No Python 3.11, 3.12 or 3.13 was found" in done.stderr


def test_a_python_that_does_not_fit_is_refused_with_its_version(tmp_path: Path) -> None:
    code = (
        "import sys; sys.version_info = (3, 10, 1, 'final', 0); sys.argv = ['setup.py', 'serve'];"
        f"import runpy; runpy.run_path({str(ROOT / 'scripts' / 'setup.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Turnkeep needs 3.11, 3.12 or 3.13" in done.stderr
