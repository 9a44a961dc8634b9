"""A peer engine behind lines of JSON: a process that `bench.engine` asks and that knows nothing of ours.

    python bench/peer.py openvino MODEL.gguf '{"threads": 2, "blocks": 0}'        needs openvino-genai
    python bench/peer.py transformers FOLDER '{"threads": 2, "blocks": 0}'        continuous batching of transformers

    in    {"id": 1, "ids": [..], "count": 64}           64 tokens, greedy, whatever the model's end is
    out   {"ready": version}    then, as they come,     {"id": 1, "new": [ids]}    {"id": 1, "done": true}

`blocks` of 32 tokens are the room for K/V; 0: as much as the peer takes. Prefix caches are on in both.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

BLOCK = 32
POLL_S = 0.005
Made = list[tuple[int, list[int], bool]]  # request, new ids, whether it has ended


class OpenVino:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import openvino_genai

        self._library = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens = 512
        if options["blocks"]:
            scheduler.num_kv_blocks = options["blocks"]
        else:
            scheduler.cache_size = 2  # GB
        properties = {"INFERENCE_NUM_THREADS": options["threads"] or os.cpu_count()}
        self._pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.version = openvino_genai.get_version()
        self._running: dict[int, Any] = {}

    def add(self, number: int, ids: list[int], count: int) -> None:
        import numpy as np
        from openvino import Tensor

        config = self._library.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = count
        config.ignore_eos, config.do_sample = True, False
        self._running[number] = self._pipe.add_request(number, Tensor(np.array([ids], np.int64)), config)

    def step(self) -> Made:
        self._pipe.step()
        made: Made = []
        for number, handle in list(self._running.items()):
            new: list[int] = []
            while handle.can_read():
                new += [token for output in handle.read().values() for token in output.generated_ids]
            ended = handle.get_status() != self._library.GenerationStatus.RUNNING
            made.append((number, new, ended))
            if ended:
                del self._running[number]
        return made


class ContinuousBatching:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import torch
        import transformers

        if options["threads"]:
            torch.set_num_threads(options["threads"])
        self.version = transformers.__version__
        module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        page = 256
        blocks = -(-options["blocks"] * BLOCK // page) if options["blocks"] else 160  # 40,960 tokens: 1.9 GB
        config = transformers.ContinuousBatchingConfig(page_size=page, num_blocks=blocks, max_batch_tokens=512)
        generation = transformers.GenerationConfig(do_sample=False)
        self._manager = module.init_continuous_batching(generation, continuous_batching_config=config)
        self._manager.start()
        self._seen: dict[int, int] = {}

    def add(self, number: int, ids: list[int], count: int) -> None:
        self._seen[number] = 0
        self._manager.add_request(ids, request_id=str(number), max_new_tokens=count, streaming=True, eos_token_id=-1)

    def step(self) -> Made:
        result = self._manager.get_result(timeout=POLL_S)
        if result is None:
            if not self._manager.is_running():
                sys.exit("the batching thread has ended")
            return []
        if result.error:
            sys.exit(result.error)
        number = int(result.request_id)
        new = result.generated_tokens[self._seen[number] :]
        self._seen[number] += len(new)
        return [(number, new, result.is_finished())]


def lines(buffer: bytearray, *, wait: bool) -> list[bytes] | None:
    """Whole lines of standard input that have come; None at its end."""
    if not wait and not select.select([0], [], [], 0)[0]:
        return []
    got = os.read(0, 1 << 20)
    if not got:
        return None
    buffer += got
    *whole, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    return whole


def main() -> None:
    kind, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no line of ours

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=out, flush=True)

    peer = {"openvino": OpenVino, "transformers": ContinuousBatching}[kind](model, options)
    say({"ready": peer.version})
    buffer = bytearray()
    running = 0
    while (asked := lines(buffer, wait=not running)) is not None:
        for line in asked:
            request = json.loads(line)
            peer.add(request["id"], request["ids"], request["count"])
            running += 1
        if running:
            for number, new, ended in peer.step():
                if new:
                    say({"id": number, "new": new})
                if ended:
                    say({"id": number, "done": True})
                    running -= 1
    os._exit(0)  # a library's threads may not end by themselves


if __name__ == "__main__":
    main()
