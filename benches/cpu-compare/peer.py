"""PyTorch's scaled_dot_product_attention on inputs from files.

One request per line on standard input: a variant, or "check VARIANT FILE" to write its output as f32.
The answer is one line: the seconds of one call, or "done".
"""

import sys
import time

import torch

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
sdpa = torch.nn.functional.scaled_dot_product_attention


def read(path, dtype, shape):
    data = torch.frombuffer(bytearray(open(path, "rb").read()), dtype=DTYPES[dtype])
    return data.reshape(shape)


def prefill(folder, dtype, heads, tokens):
    q, k = (read(f"{folder}/{x}", dtype, (1, tokens, heads, 192)).transpose(1, 2) for x in ("q", "k"))
    v = read(f"{folder}/v", dtype, (1, tokens, heads, 128)).transpose(1, 2)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # The fused kernel wants values as wide as keys; the padding is not timed.
    padded = torch.nn.functional.pad(v, (0, 64))
    return {
        "plain": lambda: sdpa(q, k, v, is_causal=True).transpose(1, 2),
        "padded": lambda: sdpa(q, k, padded, is_causal=True)[..., :128].transpose(1, 2),
    }


def decode(folder, dtype, batch, heads, tokens):
    q = read(f"{folder}/q", dtype, (batch, 1, heads, 576))
    rows = read(f"{folder}/k", dtype, (batch, 1, tokens, 576))
    scale = 192**-0.5
    per_head = q.transpose(1, 2).contiguous()
    every = rows.expand(batch, heads, tokens, 576)
    return {
        # One query row per head of one shared key head: no row is read twice.
        "folded": lambda: sdpa(q, rows, rows, scale=scale)[..., :512],
        "expanded": lambda: sdpa(per_head, every, every, scale=scale)[..., :512],
    }


def main():
    phase, folder, dtype, *sizes = sys.argv[1:]
    torch.set_num_threads(int(sizes.pop()))
    variants = {"prefill": prefill, "decode": decode}[phase](folder, dtype, *map(int, sizes))
    print(torch.__version__, *variants, flush=True)
    for line in sys.stdin:
        name, *rest = line.split()
        with torch.inference_mode():
            if name == "check":
                out = variants[rest[0]]().float().contiguous()
                open(rest[1], "wb").write(out.numpy().tobytes())
                print("done", flush=True)
                continue
            start = time.perf_counter()
            variants[name]()
            print(time.perf_counter() - start, flush=True)


main()
