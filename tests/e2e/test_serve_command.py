"""`turnkeep serve` as a process: it greets, answers the curl line it prints, and ends as a signal asks."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
START_S = 60


@dataclass
class Started:
    process: subprocess.Popen[str]
    greeting: str
    url: str
    key: str
    environ: dict[str, str]

    def turnkeep(self, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
        environ = self.environ | {"TURNKEEP_URL": self.url, "TURNKEEP_API_KEY": self.key}
        command = [sys.executable, "-m", "gateway.cli", *arguments]
        return subprocess.run(command, input=said, capture_output=True, text=True, check=False, env=environ)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Started]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TURNKEEP_")}
    environ["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", *options]
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ) as process,
    ):
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "turnkeep chat --url" in line:
                    break
            text = "".join(lines)
            url = re.search(r"answers on (\S+)", text)
            key = re.search(r"TURNKEEP_API_KEY=(\S+)", text)
            assert url, (folder / "stderr").read_text()
            yield Started(process, text, url[1], key[1] if key else "", environ)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with serving(tmp_path_factory.mktemp("serve"), "--model", "echo") as started:
        yield started


def test_the_curl_line_of_the_greeting_works_when_pasted(served: Started) -> None:
    pasted = re.search(r"^  (curl .*?[^\\])\n", served.greeting, re.MULTILINE | re.DOTALL)
    assert pasted
    words = shlex.split(pasted[1].replace("\\\n", " "))
    done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"chat.completion"' in done.stdout


def test_a_terminal_conversation_streams_and_tells_its_tokens(served: Started) -> None:
    done = served.turnkeep("chat", said="hello there\nand again\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr.count("prompt tokens") == 2
    assert done.stderr.count("TTFT") == 2
    session = re.search(r"session (\S+)\.", done.stderr)
    assert session
    more = served.turnkeep("chat", "a third", "--session", session[1])
    assert more.returncode == 0, more.stderr
    shown = served.turnkeep("sessions", "show", session[1])
    assert "hello there" in shown.stdout
    assert "a third" in shown.stdout
    assert session[1] in served.turnkeep("sessions", "list").stdout
    assert "hello there" in served.turnkeep("sessions", "export", session[1]).stdout
    assert '"deleted": true' in served.turnkeep("sessions", "delete", session[1], "--yes").stdout
    gone = served.turnkeep("sessions", "show", session[1])
    assert gone.returncode == 7
    assert "no session" in gone.stderr


def test_a_key_that_is_none_is_told_how_to_get_one(served: Started) -> None:
    command = [sys.executable, "-m", "gateway.cli", "sessions", "list", "--url", served.url]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=served.environ)
    assert done.returncode == 7
    assert "turnkeep keys create" in done.stderr


def test_a_second_start_shows_no_key_and_the_first_ends_with_0_on_sigterm(tmp_path: Path) -> None:
    with serving(tmp_path, "--model", "echo") as first:
        assert first.key.startswith("tk-")
        assert first.key not in (tmp_path / "stderr").read_text()
        first.process.send_signal(signal.SIGTERM)
        assert first.process.wait(timeout=START_S) == 0
    with serving(tmp_path, "--model", "echo") as second:
        assert second.key == "$TURNKEEP_API_KEY" or not second.key
        assert "made before" in second.greeting
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait(timeout=START_S) == 0


def test_torch_is_not_imported_by_a_gateway_with_an_upstream(served: Started, tmp_path: Path) -> None:
    """A finder that refuses torch stands in every process of this gateway."""
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')\n")
    environ = served.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    code = "import gateway.cli, gateway.app, sys; assert not {'torch', 'numba'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
