"""bench.gpu: its checks run in Triton's interpreter, find a wrong kernel, and say where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from bench import gpu, gpu_checks

pytest.importorskip("triton")
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == gpu.NO_DEVICE
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "ok": False,
        "error": "torch sees no GPU; --interpret runs the checks on a CPU",
    }


@interpreted
def test_a_kernel_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, right = gpu_checks.by_kernels, []
    monkeypatch.setattr(gpu_checks, "by_kernels", lambda *args: right.append(real(*args)) or right[0])
    assert [check.ok for check in gpu_checks.kernels(CPU, None)] == [True]
    monkeypatch.setattr(gpu_checks, "by_kernels", lambda *args: right[0] * 1.001)
    assert [check.ok for check in gpu_checks.kernels(CPU, None)] == [False]


@interpreted
def test_sealing_is_checked_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(check.ok for check in gpu_checks.seal(CPU, None))


@interpreted
@pytest.mark.prove
def test_all_checks_pass_in_the_interpreter_and_the_last_line_is_one_object(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main(["--interpret"]) == gpu.PASSED, capsys.readouterr().err
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"]
    assert {check["name"].split()[0] for check in last["checks"]} == {
        "attention",
        "seal",
        "greedy",
        "sealed",
        "sessions",
    }


@pytest.mark.prove
def test_the_kernels_compile_for_gpus_that_are_not_here() -> None:
    """In a process of its own: this one interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "bench.gpu", "--compile", "86"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == gpu.PASSED, done.stderr[-2000:]
    made = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert {one["kernel"].split()[0] for one in made} == {"partial", "merge", "append", "grid", "codes"}


@interpreted
def test_a_part_that_raises_is_a_failed_check_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("seal", "greedy", "sealed_sessions", "tiers"):
        monkeypatch.setattr(gpu_checks, name, lambda *_: [])

    def broken(*_: object) -> list[gpu_checks.Check]:
        raise RuntimeError("out of resources: shared memory")

    monkeypatch.setattr(gpu_checks, "kernels", broken)
    result = gpu.run(interpret=True, model=None, until_s=sys.maxsize)
    assert not result["ok"]
    assert result["checks"] == [
        {"name": "kernels", "ok": False, "detail": "RuntimeError: out of resources: shared memory"}
    ]
