#!/usr/bin/env python3
"""Times the cases of layer.rs with torch: batched products through cuBLAS, attention through the kernels of FlashMLA and
FlashAttention-3, each case in one CUDA graph, by the same protocol.

    python3 layer_peer.py --flashmla _flashmla_C.abi3.so --fa3 fa3.so --ours target/bench/layer.json

The two libraries are those of a vllm wheel (0.25.1, torch 2.11 for CUDA 13). A decode step is torch.bmm, a write of the cache
by index_copy_, the faster of the two attention kernels with its plan made beforehand, torch.bmm. The context chunk is gathered
by index_select; its merge is left out, for want of a fused one in torch, which favours the peer.
"""
import argparse
import json

import torch

PAGE, LATENT, NOPE, ROPE, V = 64, 512, 128, 64, 128
SCALE = (NOPE + ROPE) ** -0.5
flush = None


def cold():
    global flush
    if flush is None:
        flush = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    flush.zero_()


def time_graph(work, samples=31):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(samples + 3):
        cold()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[3:])[samples // 2]


def rand(*shape, most=1.0):
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda").uniform_(-most, most)


def split_weights(heads):
    rows = rand(heads, NOPE + V, LATENT, most=0.05)
    return rows[:, :NOPE], rows[:, NOPE:].transpose(1, 2)


def products(heads, tokens):
    w_uk, w_uv = split_weights(heads)
    query, attended = rand(tokens, heads, NOPE + ROPE), rand(tokens, heads, LATENT)
    absorbed = torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(tokens, heads, V, dtype=torch.bfloat16, device="cuda")
    # Out of place and in place, in whichever layout cuBLAS is fastest: as an engine would write it.
    uk = lambda: torch.bmm(query[..., :NOPE].transpose(0, 1), w_uk, out=absorbed.transpose(0, 1))
    uv = lambda: torch.bmm(attended.transpose(0, 1), w_uv, out=out.transpose(0, 1))
    plain_uk = lambda: torch.bmm(query[..., :NOPE].transpose(0, 1), w_uk)
    plain_uv = lambda: torch.bmm(attended.transpose(0, 1), w_uv)
    return {
        "uk": min(time_graph(uk), time_graph(plain_uk)),
        "uv": min(time_graph(uv), time_graph(plain_uv)),
        "": min(time_graph(lambda: (uk(), uv())), time_graph(lambda: (plain_uk(), plain_uv()))),
    }


def attention(kind, absorbed, q_pe, cache, lens, tables):
    batch, heads, _ = absorbed.shape
    if kind == "flashmla":
        op = torch.ops._flashmla_C.dense_decode_fwd
        query = torch.empty(batch, 1, heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
        _, _, meta, splits = op(query, cache, LATENT, lens, tables, SCALE, True, None, None, None)
        # The product writes into the concatenated query itself; the rotary part is copied beside it.
        into = query[:, 0, :, :LATENT].transpose(0, 1)

        def run():
            query[:, 0, :, LATENT:].copy_(q_pe)
            return op(query, cache, LATENT, lens, tables, SCALE, True, meta, splits, None)[0].view(batch, heads, LATENT)

        return into, run
    fwd, plan = torch.ops._vllm_fa3_C.fwd, torch.ops._vllm_fa3_C.get_scheduler_metadata
    starts = torch.arange(0, batch + 1, dtype=torch.int32, device="cuda")
    longest = int(lens.max())
    meta = plan(batch, 1, longest, heads, 1, ROPE, LATENT, torch.bfloat16, lens, starts, None, None, None, None, PAGE, 0, True,
                -1, -1, False, 0, None, 0)
    keys, values = cache[..., LATENT:], cache[..., :LATENT]

    def run():
        return fwd(q_pe, keys, values, None, None, absorbed, None, starts, None, None, None, lens, 1, longest, tables, None,
                   None, None, None, None, None, None, None, SCALE, True, -1, -1, 0.0, True, meta, 0, None, 0, None, 1, 0,
                   None)[0]

    return absorbed.transpose(0, 1), run


def decode(heads, batch, kinds):
    w_uk, w_uv = split_weights(heads)
    pages = 4096 // PAGE
    tables = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    lens = torch.full((batch,), 4096, dtype=torch.int32, device="cuda")
    cache = rand(batch * pages, PAGE, 1, LATENT + ROPE, most=1.7)
    query = rand(batch, heads, NOPE + ROPE, most=1.7)
    latent, rope = rand(batch, LATENT), rand(batch, ROPE)
    slots = tables[:, -1].long() * PAGE + PAGE - 1
    rows = cache.view(-1, LATENT + ROPE)
    q_pe = query[..., NOPE:].contiguous()
    out = torch.empty(batch, heads, V, dtype=torch.bfloat16, device="cuda")
    best = {}
    for kind in kinds:
        absorbed = torch.empty(batch, heads, LATENT, dtype=torch.bfloat16, device="cuda")
        into, attend = attention(kind, absorbed, q_pe, cache, lens, tables)

        def step():
            rows[:, :LATENT].index_copy_(0, slots, latent)
            rows[:, LATENT:].index_copy_(0, slots, rope)
            torch.bmm(query[..., :NOPE].transpose(0, 1), w_uk, out=into)
            torch.bmm(attend().transpose(0, 1), w_uv, out=out.transpose(0, 1))

        def core():
            torch.bmm(query[..., :NOPE].transpose(0, 1), w_uk, out=into)
            torch.bmm(attend().transpose(0, 1), w_uv, out=out.transpose(0, 1))

        best[kind] = (time_graph(step), time_graph(core))
    return best


def chunk(heads, new, context):
    fwd = torch.ops._vllm_fa3_C.fwd
    w = rand(heads * (NOPE + V), LATENT, most=0.05)
    query = rand(new, heads, NOPE + ROPE, most=1.7)
    latent, rope = rand(new, LATENT), rand(new, ROPE)
    pages = (new + context) // PAGE
    rows = rand(pages * PAGE, LATENT + ROPE, most=1.7)
    table = torch.randperm(pages, device="cuda")
    at = (table[: context // PAGE, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
    starts = lambda n: torch.tensor([0, n], dtype=torch.int32, device="cuda")
    starts_q, starts_k = starts(new), starts(context)

    def attend(latents, ropes, begins, length, causal):
        expanded = (latents @ w.T).view(-1, heads, NOPE + V)
        keys = torch.cat([expanded[..., :NOPE], ropes[:, None].expand(-1, heads, -1)], -1)
        return fwd(query, keys, expanded[..., NOPE:], None, None, None, None, starts_q, begins, None, None, None, new, length,
                   None, None, None, None, None, None, None, None, None, SCALE, causal, -1, -1, 0.0, True, None, 0, None, 0,
                   None, 1, 0, None)

    def step():
        attend(latent, rope, starts_q, new, True)
        gathered = rows.index_select(0, at)
        attend(gathered[:, :LATENT], gathered[:, LATENT:], starts_k, context, False)

    return time_graph(step)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--flashmla")
    parser.add_argument("--fa3")
    parser.add_argument("--ours", help="layer.json, to print ratios")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kinds = [kind for kind in ("flashmla", "fa3") if getattr(arguments, kind)]
    for kind in kinds:
        torch.ops.load_library(getattr(arguments, kind))
    ours = {}
    if arguments.ours:
        ours = {row["id"]: row["median_us"] for row in json.load(open(arguments.ours))}
    figures = {}

    def say(name, peer, what):
        figures[name] = figures.get(name, {}) | {what: peer}
        ratio = f"{ours[name]:9.2f} {peer / ours[name]:6.2f}x" if name in ours else ""
        print(f"{name:28} {what:22} {peer:9.2f} {ratio}", flush=True)

    for heads in (16, 128):
        for tokens in (1, 8, 32, 64, 128):
            for part, time in products(heads, tokens).items():
                say(f"products-h{heads}-b{tokens}" + (f"-{part}" if part else ""), time, "torch.bmm")
        for batch in (1, 32, 128):
            for kind, (step, core) in decode(heads, batch, kinds).items():
                say(f"decode-h{heads}-b{batch}", step, kind)
                say(f"decode-h{heads}-b{batch}", core, kind + ", no cache write")
    if "fa3" in kinds:
        say("chunk-h128-q512-s8192", chunk(128, 512, 8192), "fa3, no merge")
    if arguments.out:
        json.dump(figures, open(arguments.out, "w"), indent=1)


if __name__ == "__main__":
    main()
