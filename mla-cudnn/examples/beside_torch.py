"""Times torch's cuDNN attention for each case that is asked for on standard input: see beside_torch.rs."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

RUNS, SAMPLES = map(int, sys.argv[1:])


def times(run):
    run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(SAMPLES)]
    for start, end in events:
        start.record()
        for _ in range(RUNS):
            run()
        end.record()
    torch.cuda.synchronize()
    return " ".join(str(start.elapsed_time(end) * 1e3 / RUNS) for start, end in events)


def dense(requests, tokens, heads):
    q, k, v = (torch.randn(requests, tokens, heads, d, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
               for d in (192, 192, 128))
    return times(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))


def jagged(requests, tokens, heads):
    offsets = torch.arange(requests + 1, device="cuda") * tokens
    q, k, v = (torch.nested.nested_tensor_from_jagged(
        torch.randn(requests * tokens, heads, d, dtype=torch.bfloat16, device="cuda"),
        offsets, min_seqlen=tokens, max_seqlen=tokens).transpose(1, 2) for d in (192, 192, 128))
    return times(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))


with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
    for line in sys.stdin:
        case = list(map(int, line.split()))
        answers = []
        for kind in (dense, jagged):
            try:
                answers.append(kind(*case))
            except Exception as error:  # torch may not have it: the other is compared all the same
                print(f"{kind.__name__} {case}: {error!r}", file=sys.stderr)
                answers.append("")
        print(";".join(answers), flush=True)
