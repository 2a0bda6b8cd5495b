"""Times cuDNN's attention by its frontend and by torch, for each case that is asked for on standard input: see
beside_python.rs."""

import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

RUNS, SAMPLES = map(int, sys.argv[1:])
WIDTHS = {"q": 192, "k": 192, "v": 128}
SCALE = 192**-0.5


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


def frontend(requests, tokens, heads):
    """The graph of cudnn_shim.cc, without a log-sum-exp."""
    import cudnn
    bf16, f32, i32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT, cudnn.data_type.INT32
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=f32, compute_data_type=f32, handle=handle)
    given = {}

    def integers(name, numbers):
        tensor = graph.tensor(name=name, dim=[len(numbers), 1, 1, 1], stride=[1, 1, 1, 1], data_type=i32)
        given[tensor] = torch.tensor(numbers, dtype=torch.int32, device="cuda")
        return tensor

    def begins(name, width):
        return integers(name, [request * tokens * heads * width for request in range(requests + 1)])

    def strides(width):
        return [tokens * heads * width, width, heads * width, 1]

    tensors = {}
    for name, width in WIDTHS.items():
        tensors[name] = graph.tensor(name=name, dim=[requests, heads, tokens, width], stride=strides(width),
                                     data_type=bf16, ragged_offset=begins(name + "_begins", width))
        given[tensors[name]] = torch.randn(requests * tokens, heads, width, dtype=torch.bfloat16, device="cuda")
    out, _ = graph.sdpa(name="attention", **tensors, generate_stats=False, attn_scale=SCALE, use_padding_mask=True,
                        seq_len_q=integers("q_lens", [tokens] * requests),
                        seq_len_kv=integers("k_lens", [tokens] * requests),
                        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0)
    out.set_output(True).set_dim([requests, heads, tokens, 128]).set_stride(strides(128))
    out.set_ragged_offset(begins("out_begins", 128))
    given[out] = torch.empty(requests * tokens, heads, 128, dtype=torch.bfloat16, device="cuda")
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
    return lambda: graph.execute(given, workspace, handle=handle)


def dense(requests, tokens, heads):
    q, k, v = (torch.randn(requests, tokens, heads, d, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
               for d in WIDTHS.values())

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)

    return run


with torch.cuda.stream(torch.cuda.Stream()):
    # Made once for a case: while a graph is built the GPU rests, and is faster afterwards.
    last, runs = None, {}
    for line in sys.stdin:
        case = list(map(int, line.split()))
        if case != last:
            last, runs = case, {}
        answers = []
        for kind in (frontend, dense):
            try:
                if kind not in runs:
                    runs[kind] = kind(*case)
                answers.append(times(runs[kind]))
            except Exception as error:  # what is not installed here is left out, and the other compared all the same
                print(f"{kind.__name__} {case}: {error!r}", file=sys.stderr)
                answers.append("")
        print(";".join(answers), flush=True)
