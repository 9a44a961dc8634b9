"""A model's name is the same for the same files, and another one where any of them differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines.echo import ECHO_MODEL_DIR
from engines.local.identity import PIECE_BYTES, PIECES, model_fingerprint
from engines.remote.identity import llamacpp_model, sglang_model

META = {"n_vocab": 49152, "n_embd": 576, "n_params": 134515008, "size": 268435456, "n_ctx": 4096}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ECHO_MODEL_DIR, tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        file.chmod(0o644)
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)) * PIECES * PIECE_BYTES * 2)
    return tmp_path / "model"


def test_a_copy_has_the_same_name_and_a_change_anywhere_another(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    names = [model_fingerprint(folder), model_fingerprint(tmp_path / "copy")]
    assert names[0] == names[1]
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for place in (0, (len(whole) - PIECE_BYTES) * 100 // (PIECES - 1), len(whole) - 1):
        weights.write_bytes(whole[:place] + b"\xff\x00"[whole[place] == 255 :][:1] + whole[place + 1 :])
        names.append(model_fingerprint(folder))
    weights.write_bytes(whole + b"\0")
    names.append(model_fingerprint(folder))
    weights.write_bytes(whole)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    names.append(model_fingerprint(folder))
    assert len(set(names)) == len(names) - 1
    assert all(len(name) == 32 for name in names)


def test_a_server_names_its_model_only_where_it_tells_what_tells_models_apart() -> None:
    assert sglang_model({"revision": None}, {"weight_version": "default"}) is None
    assert sglang_model({"revision": "abc"}, {"weight_version": "v2"}) == "abc@v2"
    assert sglang_model({}, {}) is None
    assert llamacpp_model({"meta": {"n_ctx": 1}}, "t") is None
    assert llamacpp_model({"meta": None}, "t") is None
    names = {
        llamacpp_model({"meta": META}, "t"),
        llamacpp_model({"meta": META | {"n_ctx": 8192}}, "t"),  # how it is served is not what it is
        llamacpp_model({"meta": META | {"size": 1}}, "t"),
        llamacpp_model({"meta": META}, "u"),
    }
    assert len(names) == 3
