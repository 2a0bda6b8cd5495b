"""Times FlashInfer's kernels by its wrappers, and cuDNN's by its frontend and by torch: see beside_python.rs.

Reads a case as a line of JSON, and writes for each way of calling its times in microseconds and the sum of its output's
bits, or why there are none.
"""

import json
import sys
from itertools import accumulate

import numpy
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

RUNS, SAMPLES = map(int, sys.argv[1:])
PAGE = 64
SCALE = 192**-0.5
BF16 = torch.bfloat16


def numbers():
    """Those of beside_python.rs: signs, exponents of 2^-1 and 2^0, and mantissas."""
    state, bits = 1, []
    for _ in range(1 << 16):
        state = (state * 6364136223846793005 + 1) % 2**64
        bits.append(state >> 48)
    bits = numpy.array(bits, dtype=numpy.uint16)
    bits = (0x3F00 + (bits & 0xFF)) | (bits & 0x8000)
    return torch.from_numpy(bits.astype(numpy.uint16).view(numpy.int16)).cuda().view(BF16)


def tensor(first, *shape):
    """The numbers from `first` on, again and again."""
    count = int(numpy.prod(shape))
    return NUMBERS.roll(-first).repeat(-(-count // len(NUMBERS)))[:count].view(shape)


def starts(lens, scale=1):
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cuda") * scale


class Case:
    def __init__(self, case):
        self.heads, self.queries, self.keys = case["heads"], case["queries"], case["keys"]
        self.version, self.lse = case["version"], case["lse"]


def mla(case):
    import flashinfer
    tokens, pages = sum(case.queries), [-(-keys // PAGE) for keys in case.keys]
    cache = tensor(0, sum(pages), PAGE, 576)
    latent, rope = tensor(1000, tokens, case.heads, 512), tensor(2000, tokens, case.heads, 64)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=case.version)
    wrapper.plan(
        qo_indptr=starts(case.queries), kv_indptr=starts(pages), num_heads=case.heads, head_dim_ckv=512, head_dim_kpe=64,
        kv_indices=torch.arange(sum(pages), dtype=torch.int32, device="cuda"), page_size=PAGE, causal=True,
        kv_len_arr=torch.tensor(case.keys, dtype=torch.int32, device="cuda"), sm_scale=SCALE, q_data_type=BF16,
        kv_data_type=BF16)
    out = torch.empty_like(latent)
    lse = torch.empty(tokens, case.heads, device="cuda") if case.lse else None

    def run():
        wrapper.run(q_nope=latent, q_pe=rope, ckv_cache=cache[..., :512], kpe_cache=cache[..., 512:], out=out, lse=lse,
                    return_lse=case.lse, return_lse_base_on_e=True)
        return out

    return run


def packed(case):
    tokens, keys = sum(case.queries), sum(case.keys)
    return (tensor(0, tokens, case.heads, 192), tensor(1000, keys, case.heads, 192),
            tensor(2000, keys, case.heads, 128))


def ragged(case):
    import flashinfer
    q, k, v = packed(case)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=case.version)
    wrapper.plan(starts(case.queries), starts(case.keys), case.heads, case.heads, 192, 128, causal=True, sm_scale=SCALE,
                 q_data_type=BF16)
    out = torch.empty(*q.shape[:2], 128, dtype=BF16, device="cuda")
    lse = torch.empty(*q.shape[:2], device="cuda") if case.lse else None

    def run():
        wrapper.run(q, k, v, out=out, lse=lse, return_lse=case.lse)
        return out

    return run


def frontend(case):
    """The graph of cudnn_shim.cc for ragged requests."""
    import cudnn
    bf16, f32, i32 = cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT, cudnn.data_type.INT32
    handle = cudnn.create_handle()
    graph = cudnn.pygraph(io_data_type=bf16, intermediate_data_type=f32, compute_data_type=f32, handle=handle)
    requests, heads, given = len(case.queries), case.heads, {}
    widths = {"q": 192, "k": 192, "v": 128}
    lens = {"q": case.queries, "k": case.keys, "v": case.keys}

    def integers(name, values):
        made = graph.tensor(name=name, dim=[len(values), 1, 1, 1], stride=[1, 1, 1, 1], data_type=i32)
        given[made] = values
        return made

    def strides(longest, width):
        return [longest * heads * width, width, heads * width, 1]

    def of_lens(values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    tensors = {}
    for (name, width), data in zip(widths.items(), packed(case)):
        most = max(lens[name])
        tensors[name] = graph.tensor(name=name, dim=[requests, heads, most, width], stride=strides(most, width),
                                     data_type=bf16,
                                     ragged_offset=integers(name + "_begins", starts(lens[name], heads * width)))
        given[tensors[name]] = data
    out, _ = graph.sdpa(name="attention", **tensors, generate_stats=False, attn_scale=SCALE, use_padding_mask=True,
                        seq_len_q=integers("q_lens", of_lens(case.queries)),
                        seq_len_kv=integers("k_lens", of_lens(case.keys)),
                        diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT, diagonal_band_right_bound=0)
    longest = max(case.queries)
    out.set_output(True).set_dim([requests, heads, longest, 128]).set_stride(strides(longest, 128))
    out.set_ragged_offset(integers("out_begins", starts(case.queries, heads * 128)))
    result = given[out] = torch.empty(sum(case.queries), heads, 128, dtype=BF16, device="cuda")
    graph.build([cudnn.heur_mode.A])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")

    def run():
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(given, workspace, handle=handle)
        return result

    return run


def dense(case):
    """torch's attention of requests of one length."""
    if len(set(case.queries)) > 1 or case.queries != case.keys:
        raise ValueError("lengths differ")
    shape = (len(case.queries), case.queries[0], case.heads)
    q, k, v = (part.view(*shape, -1).transpose(1, 2) for part in packed(case))

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)

    return run


class Recording:
    """So many runs, captured once."""

    def __init__(self, run):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = run()
        torch.cuda.synchronize()
        self.bits = int(out.contiguous().view(torch.uint16).to(torch.int64).sum())
        del out
        self.graph, self.run = torch.cuda.CUDAGraph(), run
        with torch.cuda.graph(self.graph):
            for _ in range(RUNS):
                run()

    def times(self):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(SAMPLES)]
        for start, end in events:
            start.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / RUNS for start, end in events]


WAYS = {"FLASHINFER_MLA": [mla], "FLASHINFER": [ragged], "CUDNN": [frontend, dense]}
NUMBERS = numbers()

# Made once for a case: while a graph is built the GPU rests, and is faster afterwards.
last, recordings, refusals = None, {}, {}
for line in sys.stdin:
    if line != last:
        last, recordings, refusals = line, {}, {}
        torch.cuda.empty_cache()
        case = json.loads(line)
        for way in WAYS[case["backend"]]:
            try:
                recordings[way.__name__] = Recording(way(Case(case)))
            except Exception as error:  # what is not installed or not accepted is left out, and the others timed
                refusals[way.__name__] = repr(error)
    answer = {name: {"times": made.times(), "bits": made.bits} for name, made in recordings.items()}
    print(json.dumps({"timed": answer, "refused": refusals}), flush=True)
