"""A Llama of random weights, end to end: prefill and decode with attn_implementation="onnx_attn" against "sdpa" and "eager".

    python -m benchmarks.llama [--layers N] [--tiny] [--json PATH]

The sizes are those of Llama 3 8B (32 query and 8 key/value heads of 128), in bfloat16. Needs a GPU and the package transformers;
--tiny runs the same lines in small on any machine, where the numbers mean nothing. Writes benchmarks/results/<gpu>-<date>-llama.json.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine

IMPLEMENTATIONS = ("onnx_attn", "sdpa", "eager")
TURNS = 3
STEPS = 16  # decode steps in one sample


@dataclass(frozen=True)
class Work:
    """One implementation on one line: `run` is timed, after `before`, and stands for `tokens`; `result` gives logits to compare."""

    run: Callable[[], Any]
    result: Callable[[], Tensor]
    tokens: int
    before: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Line:
    """One measurement. `kind` is "prefill", "graph" (decode steps of a CUDA graph over a static cache) or "loop" (eager, growing cache)."""

    name: str
    kind: str
    batch: int
    tokens: int  # of the prompt, or in the cache
    capacity: int = 0  # of a static cache
    padding: int = 0  # tokens of the first sequence that are padding, on its left


LINES = [
    Line("prefill 8192", "prefill", 1, 8192),
    Line("prefill 8192, batch 2, 1024 of padding", "prefill", 2, 8192, padding=1024),
    Line("decode at 8192, cache of 8448", "graph", 1, 8192, 8448),
    Line("decode at 8192, cache of 32768", "graph", 1, 8192, 32768),
    Line("decode at 8192, batch 16, cache of 8448", "graph", 16, 8192, 8448),
    Line("decode at 8192, batch 16, 1024 of padding", "graph", 16, 8192, 8448, padding=1024),
    Line("decode at 8192, growing cache, no graph", "loop", 1, 8192),
]
SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2}


class Bench:
    """The model, its device, and the ways to time it."""

    def __init__(self, layers: int, tiny: bool) -> None:
        import transformers

        self.transformers, self.tiny = transformers, tiny
        self.cuda = torch.cuda.is_available() and not tiny
        self.device = "cuda" if self.cuda else "cpu"
        self.sizes = {"num_hidden_layers": layers, **(TINY if tiny else SIZES)}
        config = transformers.LlamaConfig(**self.sizes, max_position_embeddings=65536, pad_token_id=0)
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(self.device):
                self.model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(default)

    def switch(self, implementation: str) -> None:
        from torch_onnx_attn.integrations.transformers import enable

        if implementation == "onnx_attn":
            enable(self.model)
        else:
            self.model.set_attn_implementation(implementation)

    def prompt(self, line: Line) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, self.sizes["vocab_size"], (line.batch, line.tokens), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, : line.padding] = 0
        return {"input_ids": ids.to(self.device), "attention_mask": mask.to(self.device)}

    def call(self, cache: Any = None, **inputs: Any) -> Tensor:
        """Logits of the last token."""
        name = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"
        given = {} if cache is None else {name: cache}
        with torch.no_grad():
            logits: Tensor = self.model(**inputs, **given, use_cache=True, logits_to_keep=1).logits
        return logits

    def seconds(self, work: Work) -> float:
        work.before()
        if not self.cuda:
            begin = time.perf_counter()
            work.run()
            return time.perf_counter() - begin
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work.run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def static_cache(bench: Bench, line: Line) -> Any:
    """A static cache that holds `tokens` random rows. The first call of a model allocates it."""
    cache = bench.transformers.StaticCache(config=bench.model.config, max_cache_len=line.capacity)
    bench.call(cache, input_ids=torch.ones(line.batch, 1, dtype=torch.int64, device=bench.device))
    generator = torch.Generator(bench.device).manual_seed(2)
    for layer in cache.layers:
        layer.keys.normal_(generator=generator)
        layer.values.normal_(generator=generator)
    return cache


def rewind(cache: Any, tokens: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(tokens)


def prepare(bench: Bench, line: Line) -> Work:
    prompt = bench.prompt(line)
    if line.kind == "prefill":
        return Work(lambda: bench.call(**prompt), lambda: bench.call(**prompt), line.batch * line.tokens)
    token = {"input_ids": prompt["input_ids"][:, :1]}
    if line.kind == "loop":
        cache = bench.transformers.DynamicCache(config=bench.model.config)
        logits = bench.call(cache, **prompt)
        ones = torch.ones(line.batch, line.tokens + 10**4, dtype=torch.int64, device=bench.device)

        def steps() -> None:
            for _ in range(STEPS):
                seen = cache.get_seq_length() + 1
                bench.call(cache, **token, attention_mask=ones[:, :seen])

        return Work(steps, lambda: logits, line.batch * STEPS)
    cache = static_cache(bench, line)
    mask = torch.ones(line.batch, line.capacity, dtype=torch.int64, device=bench.device)
    mask[0, : line.padding] = 0
    step = {**token, **({"attention_mask": mask} if line.padding else {})}
    rewind(cache, line.tokens)
    replay, logits = capture(bench, lambda: bench.call(cache, **step))

    def steps_of_graph() -> None:
        for _ in range(STEPS):
            replay()

    def first() -> Tensor:
        rewind(cache, line.tokens)
        replay()
        return logits()

    return Work(steps_of_graph, first, line.batch * STEPS, before=lambda: rewind(cache, line.tokens))


def capture(bench: Bench, call: Callable[[], Tensor]) -> tuple[Callable[[], Any], Callable[[], Tensor]]:
    """A CUDA graph of the call, and how to get at its result; without CUDA the call itself."""
    if not bench.cuda:
        results: list[Tensor] = []

        def run() -> None:
            results[:] = [call()]

        return run, lambda: results[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = call()
    return graph.replay, lambda: logits


def measure(bench: Bench, line: Line) -> dict[str, Any]:
    """Tokens per second of each implementation, the best of some runs, and how far its logits are from those of "eager"."""
    found: dict[str, Any] = {"name": line.name, "unit": "tokens/s", **dict.fromkeys(IMPLEMENTATIONS), "refused": {}}
    logits: dict[str, Tensor] = {}
    for implementation in IMPLEMENTATIONS:
        try:
            bench.switch(implementation)
            work = prepare(bench, line)
            bench.seconds(work)
            found[implementation] = work.tokens / min(bench.seconds(work) for _ in range(TURNS))
            logits[implementation] = work.result().float()
        except Exception as error:  # such as out of memory: the other lines are still wanted
            found["refused"][implementation] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        work = None  # its cache and graph go before the next one's are made
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()
    if "eager" in logits:
        scale = logits["eager"].std().item()
        found["difference_from_eager"] = {
            name: (logits[name] - logits["eager"]).abs().max().item() / scale for name in logits if name != "eager"
        }
    return found


def show(found: dict[str, Any]) -> str:
    cells = [f"{found[name]:12.1f}" if found[name] else f"{'-':>12}" for name in IMPLEMENTATIONS]
    ratio = ""
    if found["onnx_attn"] and found["sdpa"]:
        ratio = f"{found['onnx_attn'] / found['sdpa']:8.2f}"
    apart = found.get("difference_from_eager", {})
    return f"{found['name']:44}{''.join(cells)}{ratio}   " + ", ".join(f"{name} {value:.3f}" for name, value in apart.items())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to try the program itself")
    parser.add_argument("--json", type=Path, help="where the result goes")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        print("benchmarks.llama needs the package transformers, 5 or newer, which is not installed here: pip install 'transformers>=5'")
        return 2
    if not options.tiny and not torch.cuda.is_available():
        print("benchmarks.llama needs a CUDA GPU, and there is none here; --tiny tries the program on the CPU")
        return 2
    import transformers

    transformers.logging.set_verbosity_error()
    lines = LINES
    if options.tiny:
        lines = [
            Line(line.name, line.kind, line.batch, line.tokens // 256, line.capacity // 256 + STEPS, line.padding // 256) for line in LINES
        ]
    bench = Bench(options.layers, options.tiny)
    heads = f"{bench.sizes['num_attention_heads']}/{bench.sizes['num_key_value_heads']} heads"
    print(f"Llama of {options.layers} layers, {heads}, bfloat16, {bench.device}, transformers {transformers.__version__}; tokens/s")
    print(f"{'':44}{''.join(f'{name:>12}' for name in IMPLEMENTATIONS)}{'to sdpa':>8}   distance of logits from eager, in their deviation")
    results = []
    for line in lines:
        results.append(measure(bench, line))
        print(show(results[-1]), flush=True)
        for name, reason in results[-1]["refused"].items():
            print(f"    {name}: {reason}", flush=True)
    facts = {**machine.describe(), "transformers": transformers.__version__, "model": {**bench.sizes, "dtype": "bfloat16"}}
    method = f"fastest of {TURNS} runs between two events; decode: {STEPS} steps in a run"
    path = options.json or machine.result_path("llama")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, "method": method, "lines": results}, indent=2) + "\n")
    print(f"written to {path}")
    return 1 if any("onnx_attn" in found["refused"] for found in results) else 0


if __name__ == "__main__":
    sys.exit(main())
