"""Compiles the decoder for this machine's own processor, once, and keeps it in the user's cache. Knows no model.

The name of the library holds the source, the compiler and the processor, so none of them can change unnoticed. Built
beside its place and renamed: two processes that build at once each end with a whole one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-fPIC", "-shared", "-pthread")
BUILD_S = 180.0


class CannotBuild(Exception):
    """There is no compiled decoder on this machine; says why."""


def native_library(folder: Path | None = None) -> ctypes.CDLL:
    """The decoder's library, compiled where it is not yet in `folder` (the user's cache). Raises CannotBuild."""
    compiler = _compiler()
    folder = folder or cache_folder()
    library = folder / f"decoder-{_name(compiler)}.so"
    if not library.is_file():
        _compile(compiler, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CannotBuild(f"{library} cannot be loaded: {error}") from error


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "turnkeep" / "native"


def _compiler() -> str:
    named = os.environ.get("CXX")
    found = next((path for name in (named, "g++", "clang++") if name and (path := shutil.which(name))), None)
    if found is None:
        raise CannotBuild("there is no C++ compiler (g++ or clang++; CXX names another)")
    return found


def _name(compiler: str) -> str:
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = (SOURCE.read_text(), " ".join(FLAGS), said, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """What `-march=native` looks at: a cache on a shared disk may serve several kinds of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(compiler: str, library: Path) -> None:
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            made = Path(work) / library.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_S)
            if done.returncode:
                raise CannotBuild(f"{compiler} failed: {done.stderr.strip()[-500:]}")
            made.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"the decoder could not be compiled: {error}") from error
