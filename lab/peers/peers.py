#!/usr/bin/env python3
"""Times published MLA kernels beside ours: those for Hopper (FlashMLA, FlashAttention-3, FlashInfer, cuDNN), and those
for every GPU since Ampere (FlashInfer's fa2, vLLM's Triton, torch's FlashAttention-2 and memory-efficient attention);
or, on a processor, torch's scaled_dot_product_attention.

`cargo lab peers` writes a line of JSON to standard input for each round: a case, and how many samples. A case that is
the one of the round before is not set up again. It reads one JSON object per line from standard output: first who
could be loaded; for each round the times, and that it is done; in between who is at work. The protocol is that of
`mla bench --cases`: normally distributed data, pages in a random order, one CUDA graph of everything a step enqueues,
the L2 cache overwritten before each replay, CUDA events around it, and the median. On a processor a clock takes the
place of graph and events.

A library that cannot be loaded, or refuses a case, is named in a line of its own; the others are still timed.
"""

import argparse
import importlib.util
import json
import lzma
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

import torch

PAGE = 64
# Of the indexer's cases and of a layer's, which are DeepSeek-R1's.
LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
ROW = LATENT + ROPE
DTYPE = torch.bfloat16
SCALE = (NOPE + ROPE) ** -0.5


class Recording:
    """A function's work, captured once; `beside` are microseconds that it takes besides."""

    def __init__(self, work, beside=0.0):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            work()
        # The graph reads these buffers at each replay, so they must live as long.
        self.work, self.beside = work, beside

    def times(self, filler, warm_up, samples):
        """Device times of replays on cold caches, in microseconds."""
        pairs = []
        for _ in range(warm_up + samples):
            filler.zero_()
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            self.graph.replay()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [self.beside + 1e3 * begin.elapsed_time(end) for begin, end in pairs[warm_up:]]


class Clock:
    """A function's work on a processor."""

    def __init__(self, work):
        work()
        self.work = work

    def times(self, filler, warm_up, samples):
        """Times of calls on cold caches, in microseconds."""
        times = []
        for _ in range(warm_up + samples):
            filler.zero_()
            begin = time.perf_counter()
            self.work()
            times.append(1e6 * (time.perf_counter() - begin))
        return times[warm_up:]


def normal(*shape, deviation):
    return torch.empty(*shape, dtype=DTYPE, device="cuda").normal_(0, deviation)


def offsets(lens):
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


class Dims:
    """The widths of a case: of the latent, and of a head's own part, rotary part and value."""

    def __init__(self, case):
        self.latent, self.nope, self.rope, self.value = case["dims"]
        self.qk = self.nope + self.rope
        self.scale = self.qk**-0.5
        # Kernels of absorbed attention want a rotary part: one of zeros changes nothing.
        self.columns = self.rope or 64
        self.row = self.latent + self.columns

    def rows(self, *shape):
        """Rows of a cache, or absorbed queries."""
        rows = normal(*shape, self.row, deviation=0.1)
        rows[..., self.latent + self.rope :] = 0
        return rows


class DecodeCase:
    """Queries, a paged cache and its tables; the kv lengths are those that `mla` sends."""

    def __init__(self, case):
        queries = {q for q, _ in case["requests"]}
        if len(queries) != 1:
            raise ValueError("query lengths differ")
        self.queries, = queries
        self.dims = Dims(case)
        lens = [kv for _, kv in case["requests"]]
        self.requests, self.heads, self.longest = len(lens), case["heads"], max(lens)
        pages = -(-self.longest // PAGE)
        # Some kernels read their table four entries at a time.
        pages += -pages % 4
        order = torch.randperm(self.requests * pages, device="cuda")
        self.table = order.to(torch.int32).view(self.requests, pages)
        self.lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
        self.cache = self.dims.rows(self.requests * pages, PAGE, 1)
        self.query = self.dims.rows(self.requests, self.queries, self.heads)
        self.starts = offsets([self.queries] * self.requests)

    def rows(self):
        """The queries as one row per token, in their two parts."""
        flat, latent = self.query.view(-1, self.heads, self.dims.row), self.dims.latent
        return flat[..., :latent].contiguous(), flat[..., latent:].contiguous()


class SparseCase:
    """Queries, a cache as one row of rows, and lists of its slots at the positions that `mla` sends."""

    def __init__(self, case):
        self.dims = Dims(case)
        self.lens = [kv for _, kv in case["requests"]]
        self.query_lens = [q for q, _ in case["requests"]]
        self.heads, self.format, topk = case["heads"], case["cache"], case["topk"]
        pages = -(-max(self.lens) // PAGE)
        table = torch.randperm(len(self.lens) * pages, device="cuda").view(-1, pages)
        positions = torch.full((len(case["positions"]), topk), -1, dtype=torch.int64)
        for row, own in zip(positions, case["positions"]):
            row[: len(own)] = torch.tensor(own)
        positions = positions.cuda()
        requests = torch.arange(len(self.lens)).repeat_interleave(torch.tensor(self.query_lens)).cuda()
        slots = table[requests[:, None], positions.clamp_min(0) // PAGE] * PAGE + positions % PAGE
        self.slots = torch.where(positions >= 0, slots, -1).to(torch.int32)
        self.valid = (positions >= 0).sum(-1, dtype=torch.int32)
        self.query = self.dims.rows(len(positions), self.heads)
        self.rows = self.make_rows(table.numel() * PAGE)

    def make_rows(self, count):
        if self.format == "bf16":
            return self.dims.rows(count)
        if self.format != "fp8_ds_mla" or self.dims.row != ROW:
            raise ValueError(f"takes caches of bf16, and of fp8_ds_mla with {ROW} values, not {self.format}")
        rows = torch.empty(count, 656, dtype=torch.uint8, device="cuda")
        for part in rows.split(1 << 18):
            numbers = torch.empty(len(part), ROW, device="cuda").normal_(0, 0.1)
            groups = numbers[:, :LATENT].view(-1, 4, 128)
            scales = groups.abs().amax(-1, keepdim=True) / 448
            part[:, :LATENT] = (groups / scales).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
            part[:, LATENT : LATENT + 16] = scales.flatten(1).view(torch.uint8)
            numbers[:, LATENT + self.dims.rope :] = 0
            part[:, LATENT + 16 :] = numbers[:, LATENT:].to(DTYPE).view(torch.uint8)
        return rows

    def padded(self, heads, fill=torch.Tensor.new_zeros):
        """The queries with as many heads as a kernel takes."""
        if heads == self.heads:
            return self.query
        query = fill(self.query, (len(self.query), heads, self.dims.row))
        query[:, : self.heads] = self.query
        return query


class PrefillCase:
    def __init__(self, case):
        self.query_lens, self.key_lens = zip(*case["requests"])
        self.heads, self.causal, self.dims = case["heads"], case["causal"], Dims(case)

    def packed(self):
        tokens, keys = sum(self.query_lens), sum(self.key_lens)
        return (
            normal(tokens, self.heads, self.dims.qk, deviation=1.0),
            normal(keys, self.heads, self.dims.qk, deviation=1.0),
            normal(keys, self.heads, self.dims.value, deviation=1.0),
        )

    def starts(self):
        return offsets(self.query_lens), offsets(self.key_lens)


class LayerCase:
    """What a step of the whole layer has beside its cache: W_kv_b, queries per head, and new rows."""

    def __init__(self, case):
        self.heads = case["heads"]
        self.weights = normal(self.heads, NOPE + VALUE, LATENT, deviation=0.03)
        tokens = sum(q for q, _ in case["requests"])
        self.query = normal(tokens, self.heads, NOPE + ROPE, deviation=1.0)
        self.latent, self.rope = normal(tokens, LATENT, deviation=1.0), normal(tokens, ROPE, deviation=1.0)

    def absorbed(self, case, attend, into):
        """A step of decodes: the cache's rows by index_copy_, W_UK into `into`, attention, W_UV."""
        place = (case.lens - 1).long()
        slots = case.table.gather(1, (place // PAGE)[:, None]).flatten().long() * PAGE + place % PAGE
        rows = case.cache.view(-1, ROW)
        keys, values = self.weights[:, :NOPE], self.weights[:, NOPE:].transpose(1, 2)
        out = torch.empty(len(self.query), self.heads, VALUE, dtype=DTYPE, device="cuda")

        def step():
            rows[:, :LATENT].index_copy_(0, slots, self.latent)
            rows[:, LATENT:].index_copy_(0, slots, self.rope)
            torch.bmm(self.query[..., :NOPE].transpose(0, 1), keys, out=into)
            torch.bmm(attend().transpose(0, 1), values, out=out.transpose(0, 1))

        return {"e2e_us": Recording(step)}


def find(wheels, pattern, module):
    """A file out of a folder of wheels, unpacked where it is packed, or out of an installed package."""
    places = []
    if wheels:
        places.append(pathlib.Path(wheels))
    package = importlib.util.find_spec(module)
    if package and package.submodule_search_locations:
        places.extend(pathlib.Path(place) for place in package.submodule_search_locations)
    for place in places:
        for found in sorted(place.rglob(pattern)):
            if found.suffix != ".xz":
                return str(found)
            unpacked = pathlib.Path(tempfile.mkdtemp()) / found.stem
            with lzma.open(found) as packed:
                unpacked.write_bytes(packed.read())
            return str(unpacked)
    raise FileNotFoundError(f"{pattern} is neither in {wheels or 'any folder given by --wheels'} nor in {module}")


class FlashMla:
    def __init__(self, wheels):
        torch.ops.load_library(find(wheels, "_flashmla_C*.so*", "vllm"))
        self.forward = torch.ops._flashmla_C.dense_decode_fwd

    def decode(self, case):
        case = DecodeCase(case)

        def attend(schedule, splits):
            return self.forward(
                case.query, case.cache, case.dims.latent, case.lens, case.table, case.dims.scale, True, schedule, splits,
                None,
            )

        *_, schedule, splits = attend(None, None)
        return {
            "e2e_us": Recording(lambda: attend(None, None)),
            "planned_us": Recording(lambda: attend(schedule, splits)),
        }

    def layer(self, case):
        """A step of decodes of one token each, its schedule made before."""
        step, case = LayerCase(case), DecodeCase(case)
        if case.queries != 1:
            raise ValueError("takes one query token per request")
        query = case.query[:, 0]

        def attend(schedule, splits):
            # W_UK's product is there already; the rotary part comes beside it.
            query[..., LATENT:].copy_(step.query[..., NOPE:])
            return self.forward(
                case.query, case.cache, case.dims.latent, case.lens, case.table, case.dims.scale, True, schedule, splits,
                None,
            )

        *_, schedule, splits = attend(None, None)
        return step.absorbed(
            case, lambda: attend(schedule, splits)[0].view(-1, step.heads, LATENT), query[..., :LATENT].transpose(0, 1)
        )

    def sparse(self, case):
        """As engines call it: heads padded to 64 or 128, and a cache of bf16 by the prefill kernel."""
        case = SparseCase(case)
        heads = 64 if case.heads <= 64 else 128
        padded = case.padded(heads)
        if case.format == "bf16":
            rows, lists = case.rows.view(-1, 1, case.dims.row), case.slots[:, None]
            counts = None if bool((case.slots >= 0).all()) else case.valid

            def attend_rows(query, counts):
                return torch.ops._flashmla_C.sparse_prefill_fwd(
                    query, rows, lists, case.dims.scale, case.dims.latent, None, counts, None
                )

            return {
                "e2e_us": Recording(lambda: attend_rows(case.padded(heads, torch.Tensor.new_empty), case.valid)),
                "planned_us": Recording(lambda: attend_rows(padded, counts)),
            }
        queries = set(case.query_lens)
        if case.heads < 32:
            # vLLM sends all tokens as one request.
            shape = (1, len(case.query))
        elif len(queries) == 1:
            shape = (len(case.query_lens), *queries)
        else:
            raise ValueError("query lengths differ")
        rows, lists = case.rows.view(-1, PAGE, 1, 656), case.slots.view(*shape, -1)

        def attend(query, schedule, splits):
            return torch.ops._flashmla_C.sparse_decode_fwd(
                query.view(*shape, heads, ROW), rows, lists, None, None,  # topk_length, attn_sink
                schedule, splits, None, None, None,                       # extra_kv, extra_indices, extra_topk_length
                LATENT, case.dims.scale, None,                            # d_v, scale, out
            )

        *_, schedule, splits = attend(padded, None, None)
        return {
            "e2e_us": Recording(lambda: attend(case.padded(heads), None, None)),
            "planned_us": Recording(lambda: attend(padded, schedule, splits)),
        }


class FlashAttention3:
    def __init__(self, wheels):
        torch.ops.load_library(find(wheels, "*fa3*.so*", "vllm"))
        self.forward = torch.ops._vllm_fa3_C.fwd
        self.schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata

    def call(self, q, k, v, *, q_v=None, starts, key_starts=None, lens=None, max_lens, table=None, causal,
             schedule=None, scale=SCALE):
        return self.forward(
            q, k, v, None, None, q_v, None,            # k_new, v_new, q_v, out
            starts, key_starts, None,                  # cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new
            None, lens, max_lens[0], max_lens[1],              # seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
            table, None, None,                         # page_table, kv_batch_idx, leftpad_k
            None, None, None,                          # rotary_cos, rotary_sin, seqlens_rotary
            None, None, None,                          # q_descale, k_descale, v_descale
            scale, causal, -1, -1, 0.0, True,          # scale, causal, window, softcap, rotary_interleaved
            schedule, 0, None, 0, None, 1, 0, None,    # scheduler_metadata, num_splits, pack_gqa, sm_margin, …
        )

    def plan(self, case):
        return self.schedule(
            case.requests, case.queries, case.longest, case.heads, 1, case.dims.columns, case.dims.latent, DTYPE,
            case.lens, case.starts, None, None, None, None, PAGE, 0, True, -1, -1, False, 0, None, 0,
        )

    def attend(self, case, latent, rope, schedule):
        width = case.dims.latent
        return self.call(
            rope, case.cache[..., width:], case.cache[..., :width], q_v=latent, starts=case.starts, lens=case.lens,
            max_lens=(case.queries, case.longest), table=case.table, causal=True, schedule=schedule,
            scale=case.dims.scale,
        )

    def decode(self, case):
        case = DecodeCase(case)
        rows, schedule = case.rows(), self.plan(case)
        return {
            "e2e_us": Recording(lambda: self.attend(case, *rows, self.plan(case))),
            "planned_us": Recording(lambda: self.attend(case, *rows, schedule)),
        }

    def layer(self, case):
        """A step of decodes of one token each, its schedule made before; or one prefill, without a merge."""
        step = LayerCase(case)
        if {q for q, _ in case["requests"]} != {1}:
            return self.chunk(step, *case["requests"])
        case = DecodeCase(case)
        latent = torch.empty(case.requests, case.heads, LATENT, dtype=DTYPE, device="cuda")
        rope, schedule = step.query[..., NOPE:].contiguous(), self.plan(case)
        return step.absorbed(case, lambda: self.attend(case, latent, rope, schedule)[0], latent.transpose(0, 1))

    def chunk(self, step, request, *others):
        if others:
            raise ValueError("takes decodes of one token each, or one prefill")
        new, keys = request
        context, heads = keys - new, step.heads
        pages = -(-keys // PAGE)
        rows = normal(pages * PAGE, ROW, deviation=1.0)
        places = torch.randperm(pages, device="cuda")[:, None] * PAGE + torch.arange(PAGE, device="cuda")
        places, weights = places.flatten()[:context], step.weights.view(-1, LATENT)
        starts, context_starts = offsets([new]), offsets([context])

        def attend(latents, ropes, key_starts, length, causal):
            expanded = (latents @ weights.T).view(-1, heads, NOPE + VALUE)
            k = torch.cat([expanded[..., :NOPE], ropes[:, None].expand(-1, heads, -1)], -1)
            self.call(
                step.query, k, expanded[..., NOPE:], starts=starts, key_starts=key_starts, max_lens=(new, length),
                causal=causal,
            )

        def run():
            attend(step.latent, step.rope, starts, new, True)
            if context:
                gathered = rows.index_select(0, places)
                attend(gathered[:, :LATENT], gathered[:, LATENT:], context_starts, context, False)

        return {"e2e_us": Recording(run)}

    def sparse(self, case):
        """Pages of one token, with the lists for tables: every query token is a request."""
        case = SparseCase(case)
        if case.format != "bf16":
            raise ValueError(f"takes caches of bf16, not {case.format}")
        dims, width = case.dims, case.dims.latent
        latent, rope = case.query[..., :width].contiguous(), case.query[..., width:].contiguous()
        rows = case.rows[:, None, None]
        tokens, topk = case.slots.shape

        def starts():
            return torch.arange(tokens + 1, dtype=torch.int32, device="cuda")

        def attend(starts, schedule):
            return self.call(
                rope, rows[..., width:], rows[..., :width], q_v=latent, starts=starts, lens=case.valid,
                max_lens=(1, topk), table=case.slots, causal=True, schedule=schedule, scale=dims.scale,
            )

        begin = starts()
        schedule = self.schedule(
            tokens, 1, topk, case.heads, 1, dims.columns, width, DTYPE, case.valid, begin, None, None, None, None, 1, 0,
            True, -1, -1, False, 0, None, 0,
        )
        return {
            "e2e_us": Recording(lambda: attend(starts(), None)),
            "planned_us": Recording(lambda: attend(begin, schedule)),
        }

    def prefill(self, case):
        case = PrefillCase(case)
        (q, k, v), (starts, key_starts) = case.packed(), case.starts()
        max_lens = (max(case.query_lens), max(case.key_lens))
        return {"e2e_us": Recording(
            lambda: self.call(
                q, k, v, starts=starts, key_starts=key_starts, max_lens=max_lens, causal=case.causal,
                scale=case.dims.scale,
            )
        )}


def install(wheels):
    """Puts the wheels of a folder where this process finds them."""
    found = [str(wheel) for wheel in pathlib.Path(wheels).rglob("*.whl")]
    if not found:
        raise FileNotFoundError(f"no wheel is in {wheels}")
    target = tempfile.mkdtemp()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target]
    subprocess.run([*pip, *found], check=True, stdout=sys.stderr)
    sys.path.insert(0, target)


class FlashInfer:
    backend = "fa3"

    def __init__(self, wheels):
        # It compiles its kernels on first use, which takes two minutes.
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{major}.{minor}{'a' if major >= 9 else ''}")
        if wheels and not importlib.util.find_spec("flashinfer"):
            install(wheels)
        import flashinfer

        self.library = flashinfer
        self.workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def decode(self, case):
        case = DecodeCase(case)
        wrapper = self.library.mla.BatchMLAPagedAttentionWrapper(self.workspace, backend=self.backend)
        latent, rope = case.rows()
        dims = case.dims
        rows = case.cache.view(-1, PAGE, dims.row)
        latents, ropes = rows[..., : dims.latent].contiguous(), rows[..., dims.latent :].contiguous()
        pages = (case.lens + PAGE - 1) // PAGE
        page_starts = offsets(pages.tolist())
        used = torch.cat([table[:count] for table, count in zip(case.table, pages.tolist())])

        def plan():
            wrapper.plan(
                case.starts, page_starts, used, case.lens, case.heads, dims.latent, dims.columns, PAGE,
                case.queries > 1, dims.scale, DTYPE, DTYPE,
            )
            torch.cuda.synchronize()

        plan()
        begin = time.perf_counter()
        plan()
        planning = 1e6 * (time.perf_counter() - begin)

        def attend():
            wrapper.run(latent, rope, latents, ropes, return_lse=True)

        # The plan is made on the host from lengths that it copies there, which no graph can hold.
        return {"e2e_us": Recording(attend, planning), "planned_us": Recording(attend)}

    def prefill(self, case):
        case = PrefillCase(case)
        (q, k, v), (starts, key_starts) = case.packed(), case.starts()
        wrapper = self.library.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend=self.backend)
        wrapper.plan(
            starts, key_starts, case.heads, case.heads, case.dims.qk, case.dims.value, causal=case.causal,
            sm_scale=case.dims.scale, q_data_type=DTYPE,
        )
        return {"planned_us": Recording(lambda: wrapper.run(q, k, v, return_lse=True))}


class FlashInferFa2(FlashInfer):
    """Its kernels for every GPU since Ampere."""

    backend = "fa2"


class TritonMla:
    """vLLM's decode in Triton: a file of the vllm wheel, which runs without the rest of vllm."""

    def __init__(self, wheels):
        import triton

        path = find(wheels, "triton_decode_attention.py", "vllm")
        # All that it takes of vllm.
        stands_in = {
            "vllm": {},
            "vllm.platforms": {"current_platform": types.SimpleNamespace(is_rocm=lambda: False)},
            "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        }
        before = {name: sys.modules.get(name) for name in stands_in}
        for name, contents in stands_in.items():
            sys.modules[name] = types.ModuleType(name)
            vars(sys.modules[name]).update(contents)
        try:
            spec = importlib.util.spec_from_file_location("triton_decode_attention", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            for name, known in before.items():
                del sys.modules[name]
                if known:
                    sys.modules[name] = known
        self.forward, self.next_power_of_2 = module.decode_attention_fwd, triton.next_power_of_2

    def decode(self, case):
        case = DecodeCase(case)
        if case.queries != 1:
            raise ValueError("takes one query token per request")
        query, width = case.query[:, 0], case.dims.latent
        # As many splits as vLLM chooses, by the longest request.
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        splits = min(self.next_power_of_2(max(1, case.longest // 512)), 2 * processors)
        partial = torch.empty(case.requests, case.heads, splits, width + 1, device="cuda")
        scale = torch.ones((), device="cuda")

        def outputs():
            shape = (case.requests, case.heads)
            return tuple(torch.zeros(size, dtype=DTYPE, device="cuda") for size in ((*shape, width), shape))

        def attend(out, lse):
            self.forward(
                query, case.cache, case.cache[..., :width], out, lse, case.table, case.lens, partial, splits,
                case.dims.scale, PAGE, k_scale=scale, v_scale=scale, is_mla=True,
            )

        ready = outputs()
        return {"e2e_us": Recording(lambda: attend(*outputs())), "planned_us": Recording(lambda: attend(*ready))}


class TorchFlash:
    """torch's FlashAttention-2, which takes values as wide as keys: padding them is the engine's work."""

    def __init__(self, _):
        self.forward = torch.ops.aten._flash_attention_forward

    def prefill(self, case):
        case = PrefillCase(case)
        (q, k, v), (starts, key_starts) = case.packed(), case.starts()
        max_lens = (max(case.query_lens), max(case.key_lens))

        def padded():
            return torch.nn.functional.pad(v, (0, case.dims.qk - case.dims.value))

        def attend(values):
            self.forward(q, k, values, starts, key_starts, *max_lens, 0.0, case.causal, False, scale=case.dims.scale)

        ready = padded()
        return {"e2e_us": Recording(lambda: attend(padded())), "planned_us": Recording(lambda: attend(ready))}


class TorchEfficient:
    """torch's memory-efficient attention."""

    def __init__(self, _):
        self.forward = torch.ops.aten._efficient_attention_forward

    def prefill(self, case):
        case = PrefillCase(case)
        (q, k, v), (starts, key_starts) = case.packed(), case.starts()
        max_lens = (max(case.query_lens), max(case.key_lens))
        # Causal from the bottom right: the queries are a request's last tokens.
        mask = 2 if case.causal else 0
        return {"e2e_us": Recording(
            lambda: self.forward(
                q[None], k[None], v[None], None, starts, key_starts, *max_lens, 0.0, mask, True, scale=case.dims.scale
            )
        )}


class Cudnn:
    def __init__(self, _):
        from torch.nn import attention

        self.context = lambda: attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)

    def prefill(self, case):
        case = PrefillCase(case)
        if len(set(case.query_lens)) > 1 or case.query_lens != case.key_lens:
            raise ValueError("takes requests of one length without context")
        shape = (len(case.query_lens), case.query_lens[0], case.heads)
        q, k, v = (
            normal(*shape, width, deviation=1.0).transpose(1, 2)
            for width in (case.dims.qk, case.dims.qk, case.dims.value)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        with self.context():
            return {"e2e_us": Recording(lambda: attend(q, k, v, is_causal=case.causal))}


class Sdpa:
    """torch's scaled_dot_product_attention on a processor, on tensors that lie as it likes them, without pages."""

    def __init__(self, _):
        self.attend = torch.nn.functional.scaled_dot_product_attention

    def random(self, case, *shape):
        return torch.empty(*shape, dtype={"bf16": DTYPE, "f32": torch.float32}[case["dtype"]]).normal_(0, 0.1)


class SdpaFolded(Sdpa):
    """The heads of a query as rows of one head, so that no row of the cache is read twice."""

    def decode(self, case):
        if len({tuple(request) for request in case["requests"]}) > 1 or case["requests"][0][0] != 1:
            raise ValueError("takes requests of one token and of one length")
        requests, (_, length), dims = len(case["requests"]), case["requests"][0], Dims(case)
        row = dims.latent + dims.rope
        query = self.random(case, requests, 1, case["heads"], row)
        return {"e2e_us": Clock(self.prepare(dims, query, self.random(case, requests, 1, length, row)))}

    def prepare(self, dims, query, rows):
        return lambda: self.attend(query, rows, rows, scale=dims.scale)[..., : dims.latent]


class SdpaExpanded(SdpaFolded):
    """The rows of the cache repeated for each head, without a copy."""

    def prepare(self, dims, query, rows):
        per_head, every = query.transpose(1, 2).contiguous(), rows.expand(-1, query.shape[2], -1, -1)
        return lambda: self.attend(per_head, every, every, scale=dims.scale)[..., : dims.latent]


class SdpaProducts(SdpaFolded):
    """Two batched products with a softmax between them."""

    def prepare(self, dims, query, rows):
        query, keys, values = query[:, 0], rows[:, 0].transpose(1, 2), rows[:, 0, :, : dims.latent]
        return lambda: torch.softmax((query * dims.scale) @ keys, -1) @ values


class SdpaPlain(Sdpa):
    """Values of their own width, for which there is no fused kernel."""

    def prefill(self, case):
        lens = {length for request in case["requests"] for length in request}
        if len(lens) > 1 or not case["causal"]:
            raise ValueError("takes requests of one length without context")
        shape, dims = (len(case["requests"]), case["heads"], *lens), Dims(case)
        q, k, v = (self.random(case, *shape, width) for width in (dims.qk, dims.qk, dims.value))
        return {"e2e_us": Clock(self.prepare(q, k, v))}

    def prepare(self, q, k, v):
        return lambda: self.attend(q, k, v, is_causal=True).transpose(1, 2)


class SdpaPadded(SdpaPlain):
    """Values widened to the keys' width, before the clock starts."""

    def prepare(self, q, k, v):
        width = v.shape[-1]
        v = torch.nn.functional.pad(v, (0, q.shape[-1] - width))
        return lambda: self.attend(q, k, v, is_causal=True)[..., :width].transpose(1, 2)


PEERS = {
    "flashmla": FlashMla,
    "fa3": FlashAttention3,
    "flashinfer": FlashInfer,
    "cudnn": Cudnn,
    "flashinfer-fa2": FlashInferFa2,
    "triton": TritonMla,
    "torch-flash": TorchFlash,
    "torch-efficient": TorchEfficient,
    # On a processor.
    "sdpa-folded": SdpaFolded,
    "sdpa-expanded": SdpaExpanded,
    "sdpa-products": SdpaProducts,
    "sdpa-plain": SdpaPlain,
    "sdpa-padded": SdpaPadded,
}


def say(**line):
    print(json.dumps(line), flush=True)


def load(names, wheels):
    """Those of the peers that can be had."""
    peers = {}
    for name in names:
        say(progress=f"{name} loads")
        try:
            peers[name] = PEERS[name](wheels)
        except Exception as error:
            say(peer=name, refused=f"cannot be loaded: {error!r}"[:300])
    return peers


def record(peers, case):
    """What each peer does with a case: its name, what is timed, and the recording."""
    recordings = []
    for name, peer in peers.items():
        if not hasattr(peer, case["kind"]):
            continue
        say(progress=f"{name} sets up {case['id']}")
        try:
            recordings.extend((name, metric, work) for metric, work in getattr(peer, case["kind"])(case).items())
        except Exception as error:
            say(peer=name, id=case["id"], refused=repr(error)[:300])
    return recordings


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--wheels", help="a folder with the libraries, where they are not installed")
    arguments.add_argument("--peers", default=",".join(PEERS), help="comma-separated, of: " + ", ".join(PEERS))
    arguments.add_argument("--warm-up", type=int, default=3)
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments.add_argument("--threads", type=int, help="threads of a processor")
    given = arguments.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    if given.threads:
        torch.set_num_threads(given.threads)
    filler = torch.empty(512 * 2**20, dtype=torch.uint8, device=given.device)
    peers = load(given.peers.split(","), given.wheels)
    say(torch=torch.__version__, loaded=list(peers))
    current, recordings = None, []
    for line in sys.stdin:
        case = json.loads(line)
        if case["id"] != current:
            recordings = []
            torch.cuda.empty_cache()
            current, recordings = case["id"], record(peers, case)
        for peer, metric, recording in recordings:
            say(progress=f"{peer} runs {current}")
            times = recording.times(filler, given.warm_up, case["samples"])
            say(peer=peer, id=current, **{metric: times})
        say(done=current)


if __name__ == "__main__":
    main()
