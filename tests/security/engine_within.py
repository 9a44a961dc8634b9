"""Our whole engine in this process: its HTTP front, its model loop in a thread, its tiers there to be looked at.

The weights are random and tiny, or a model's own; the tokenizer is the demonstration model's. The remote store is a
shelf in memory.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engines.kv_stream import KvStream
from engines.local.engine import LocalEngine
from engines.local.frames import FrameReader, encode_frame
from engines.local.kv.events import KvPublisher
from engines.local.kv.storage import KVStorage
from engines.local.kv.tiers.remote import RemoteTier
from engines.local.launch import EngineOptions
from engines.local.load import load_core
from engines.local.model_process import ModelProcess, _Link
from engines.local.process import Loaded, ModelLoop, read_load_command
from engines.local.server import create_app
from tests.engines.local.test_remote_tier import Shelf
from tests.gateway.sessions.families import TEMPLATES

NAME = "within"
BLOCK = 16
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def random_model(folder: Path, tokenizer_of: Path) -> Path:
    """Two layers of random weights behind the tokenizer of another model, with a template that takes tool calls."""
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(7)
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in TOKENIZER:
        if (tokenizer_of / name).is_file():
            shutil.copy(tokenizer_of / name, folder / name)
    shutil.copy(TEMPLATES / "qwen2.5.jinja", folder / "chat_template.jinja")
    return folder


class Within(ModelProcess):
    """The model's process as a thread."""

    async def __aenter__(self) -> Within:
        ours, theirs = socket.socketpair()
        self.loaded: Loaded | None = None
        self._thread = threading.Thread(target=self._run, args=(theirs,), name="model", daemon=True)
        self._thread.start()
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: _Link(self), sock=ours)
        self._send({"k": "load", "folder": str(self._folder), "options": self._options})
        return self

    def _run(self, channel: socket.socket) -> None:
        with channel:
            reader = FrameReader()
            command = read_load_command(channel, reader)
            assert command is not None
            loaded = self.loaded = load_core(Path(command["folder"]), command["options"])
            told = ("window", "vocab", "block_size", "device", "dtype", "no_shift", "no_native", "eviction")
            info = {name: getattr(loaded, name) for name in (*told, "kv_refused", "attention")}
            channel.sendall(encode_frame({"k": "ready", "info": info | {"epoch": "within"}}))
            ModelLoop(
                loaded.core,
                channel,
                reader,
                make_request=loaded.make_request,
                status=loaded.status,
                vocab=loaded.vocab,
                clock=time.monotonic,
                kv_events=loaded.kv_events,
                suspension=loaded.suspension,
            ).run()

    async def aclose(self) -> None:
        self._transport.close()
        await asyncio.to_thread(self._thread.join, 60)
        assert not self._thread.is_alive()

    async def exit_code(self) -> int:
        return 0


@dataclass
class EngineWithin:
    url: str
    core: LocalEngine
    kv: KvPublisher
    shelf: Shelf
    kv_dir: Path

    @property
    def storage(self) -> KVStorage:
        found = self.core._cache.pool._contents
        assert isinstance(found, KVStorage)
        return found

    def dump(self) -> Iterator[tuple[str, bytes]]:
        """All memory of the session tiers, by what it is: K/V, ids of paths, ids in indexes, what is told of them."""
        core, storage, tiers = self.core, self.storage, self.core._tiers
        assert tiers is not None
        assert tiers.disk is not None
        for layer in storage.keys:
            yield "device", raw(storage.keys[layer]) + raw(storage.values[layer])
        for arena in storage.arenas.values():
            yield "device", raw(arena.bytes)
        for shelf in tiers.host._shelves.values():
            yield "host", raw(shelf.memory.bytes)
        if tiers._staging is not None:
            yield "staging", raw(tiers._staging)
        for piece in (*tiers.host.pieces(), *(p for file in tiers.disk.catalogue.files.values() for p in file.pieces)):
            yield "index of tiers", piece.token_bytes
        for piece, content in tiers.disk._gathered:
            yield "gathered", piece.token_bytes + raw(content)
        for path in core._sessions:
            yield "session cache", path.ids.tobytes()
        for node in core._cache.index._nodes.values():
            yield "prefix index", node.key
        for _, payload in self.kv._kept:
            yield "events", payload
        for blocks in self.kv.stream.resident._tiers.values():
            for block in blocks.values():
                yield "events", block.token_bytes
        for key, value in self.shelf.held.items():
            yield "remote", key.encode() + value


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@asynccontextmanager
async def engine_within(model: Path, kv_dir: Path, *, pages: int, host_pages: int) -> AsyncIterator[EngineWithin]:
    """Up once the model is loaded. Room for `pages` pages on the device and `host_pages` in host memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    head = config.hidden_size // config.num_attention_heads
    page = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 4 * BLOCK
    host = host_pages * -(-page // 4096) * 4096
    options = EngineOptions(
        model=str(model),
        device="cpu",
        dtype="float32",
        block_size=BLOCK,
        threads=1,
        pool_bytes=(pages + 1) * page,
        host_bytes=host,
        disk_bytes=1 << 30,
        kv_dir=kv_dir,
        window=512,
        max_sessions=3,
        kernels="torch",
        speculate="off",
        eviction="lru",
        kv_events="tcp://127.0.0.1:0",
    )
    async with KvPublisher(KvStream(time.time), "tcp://127.0.0.1:0") as kv:
        backend = Within(model, options.core(), name=NAME, kv=kv.stream)
        async with backend:
            async with asyncio.timeout(300):
                await backend.ready.wait()
            assert backend.loaded is not None
            core = backend.loaded.core
            assert isinstance(core, LocalEngine)
            assert core._tiers is not None
            assert core._tiers.disk is not None
            shelf = Shelf()
            core._tiers.remote = RemoteTier(shelf, core._tiers.disk.layout, report=print)
            app = create_app(backend, clock=time.monotonic, now=time.time, kv=kv, kv_dir=kv_dir)
            with socket.create_server(("127.0.0.1", 0)) as listener:
                config = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1)
                server = uvicorn.Server(config)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    while not server.started:  # noqa: ASYNC110 - uvicorn tells nobody
                        await asyncio.sleep(0.01)
                    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                    yield EngineWithin(url, core, kv, shelf, kv_dir)
                finally:
                    server.should_exit = True
                    await serving
        core._tiers.disk.close()
