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


def prefill(folder, dtype, requests, heads, tokens):
    def read_heads(name, width):
        rows = read(f"{folder}/{name}", dtype, (requests, tokens, heads, width))
        return rows.transpose(1, 2).contiguous()

    q, k, v = read_heads("q", 192), read_heads("k", 192), read_heads("v", 128)
    # The fused kernel wants values as wide as keys; the padding is not timed.
    padded = torch.nn.functional.pad(v, (0, 64))
    return {
        "plain": lambda: sdpa(q, k, v, is_causal=True).transpose(1, 2),
        "padded": lambda: sdpa(q, k, padded, is_causal=True)[..., :128].transpose(1, 2),
    }


def decode(folder, dtype, requests, heads, tokens):
    q = read(f"{folder}/q", dtype, (requests, 1, heads, 576))
    rows = read(f"{folder}/k", dtype, (requests, 1, tokens, 576))
    scale = 192**-0.5
    per_head = q.transpose(1, 2).contiguous()
    every = rows.expand(requests, heads, tokens, 576)
    queries, keys, values = q[:, 0], rows[:, 0].transpose(1, 2), rows[:, 0, :, :512]
    return {
        # One query row per head of one shared key head: no row is read twice.
        "folded": lambda: sdpa(q, rows, rows, scale=scale)[..., :512],
        "expanded": lambda: sdpa(per_head, every, every, scale=scale)[..., :512],
        # Two batched products with a softmax between them.
        "products": lambda: torch.softmax((queries * scale) @ keys, -1) @ values,
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
