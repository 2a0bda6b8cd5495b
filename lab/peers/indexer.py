# Times published kernels of the indexer beside ours: DeepGEMM's logits, the top-k of vLLM and torch, and a decode step
# of a sparse layer as vLLM makes it of these and others.
#
# `cargo lab indexer --peers` puts peers.py in front of this, whose protocol and helpers these are, and gives one case
# in JSON. A line of JSON goes to standard output for each peer and part: its times, or why it refuses.

import unittest.mock

WIDTH = 128
E4M3 = torch.float8_e4m3fn


class IndexCase:
    """Queries, index keys in pages of 64 and head weights of a batch, and logits that a selection would get."""

    def __init__(self, case):
        self.query_lens, self.key_lens = zip(*case["requests"])
        self.heads, self.topk, self.layer = case["heads"], case["topk"], case["layer"]
        self.tokens, self.requests, self.longest = sum(self.query_lens), len(self.key_lens), max(self.key_lens)
        seen = [kv - q + 1 + i for q, kv in case["requests"] for i in range(q)]
        self.seen = torch.tensor(seen, dtype=torch.int32, device="cuda")

    def queries(self):
        values = torch.empty(self.tokens, self.heads, WIDTH, device="cuda").normal_().to(E4M3)
        return values, torch.randn(self.tokens, self.heads, device="cuda") / self.heads

    def keys(self, count):
        values = torch.empty(count, WIDTH, dtype=E4M3, device="cuda")
        for some in values.split(1 << 20):
            some.copy_(torch.empty(some.shape, device="cuda").normal_())
        return values, torch.rand(count, device="cuda") + 0.5

    def logits(self):
        return torch.empty(self.tokens, self.longest, device="cuda").normal_()


def scores(query, weights, keys, scales):
    """The logits of one token."""
    products = torch.relu(query.float() @ keys.float().T)
    return (products * weights[:, None]).sum(0) * scales


def check(given, expected):
    distance = ((given - expected).abs().max() / expected.abs().max()).item()
    if not distance < 1e-2:
        raise ValueError(f"its logits are off by {distance:.1e} of the largest")


class DeepGemm:
    def __init__(self, wheels):
        if wheels:
            sys.path.insert(0, wheels)
        try:
            import deep_gemm
        except ImportError:
            from vllm.third_party import deep_gemm
        self.library = deep_gemm
        if hasattr(deep_gemm, "set_pdl"):
            deep_gemm.set_pdl(True)

    def call(self, names):
        for name in names:
            if hasattr(self.library, name):
                return getattr(self.library, name), name.startswith("fp8_fp4")
        raise ValueError(f"it has none of {', '.join(names)}")

    def parts(self, case):
        queries = set(case.query_lens)
        if case.requests > 1 and len(queries) > 1:
            raise ValueError("query lengths differ")
        if max(queries) <= 2:
            yield "logits", self.paged(case, max(queries))
        elif case.requests == 1:
            yield "logits", self.ragged(case)
        else:
            raise ValueError("it takes 1 or 2 query tokens for each request, or one request")

    def ragged(self, case):
        call, pair = self.call(["fp8_fp4_mqa_logits", "fp8_mqa_logits"])
        query, weights = case.queries()
        keys, scales = case.keys(case.longest)
        start = torch.zeros_like(case.seen)
        given = (query, None) if pair else query
        work = lambda: call(given, (keys, scales), weights, start, case.seen, clean_logits=False)
        last = case.tokens - 1
        check(work()[last, : case.longest], scores(query[last], weights[last], keys, scales))
        return Recording(work)

    def paged(self, case, queries):
        call, pair = self.call(["fp8_fp4_paged_mqa_logits", "fp8_paged_mqa_logits"])
        pages = -(-case.longest // PAGE)
        query, weights = case.queries()
        keys, scales = case.keys(case.requests * pages * PAGE)
        rows = keys.view(torch.uint8).view(-1, PAGE * WIDTH), scales.view(-1, PAGE).view(torch.uint8)
        cache = torch.cat(rows, 1).view(-1, PAGE, 1, WIDTH + 4)
        table = torch.randperm(case.requests * pages, device="cuda").to(torch.int32).view(case.requests, pages)
        lens = case.seen.view(case.requests, queries)
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        query = query.view(case.requests, queries, case.heads, WIDTH)
        given = (query, None) if pair else query

        def work():
            plan = self.library.get_paged_mqa_logits_metadata(lens, PAGE, multiprocessors)
            return call(given, cache, weights, lens, table, plan, case.longest, clean_logits=False)

        slots = (table[-1].long()[:, None] * PAGE + torch.arange(PAGE, device="cuda")).flatten()
        seen = int(case.seen[-1])
        expected = scores(query[-1, -1], weights[-1], keys[slots], scales[slots])
        check(work()[-1, :seen], expected[:seen])
        return Recording(work)


def recall(lists, logits, seen, topk):
    """How much of what is to be chosen is chosen, at least, of some rows."""
    least = 1.0
    for row in range(0, len(lists), max(1, len(lists) // 16)):
        values = logits[row, : seen[row]]
        wanted = values.topk(min(topk, len(values))).values
        chosen = lists[row][lists[row] >= 0].long().unique()
        right = (values[chosen[chosen < len(values)]] >= wanted[-1]).sum().item()
        least = min(least, right / len(wanted))
    return least


class Torch:
    """torch.topk, which sorts what it finds, and has no lengths: the logits behind a row's end are -inf."""

    def __init__(self, _):
        pass

    def parts(self, case):
        logits = case.logits()
        if case.longest < case.topk:
            raise ValueError(f"contexts of less than {case.topk} tokens")
        for row, seen in enumerate(case.seen.tolist()):
            logits[row, seen:] = -torch.inf
        yield "lists", Recording(lambda: logits.topk(case.topk, sorted=False))


class Vllm:
    """vLLM's selections; the translation to slots is not among them."""

    def __init__(self, wheels):
        torch.ops.load_library(find(wheels, "_C_stable_libtorch*.so*", "vllm"))

    def parts(self, case):
        ops, k, columns = torch.ops._C, case.topk, case.longest
        logits, lens = case.logits(), case.seen.view(-1, 1)
        lists = torch.full((case.tokens, k), -1, dtype=torch.int32, device="cuda")
        workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        start = torch.zeros_like(case.seen)
        calls = {
            "per row": lambda: ops.top_k_per_row_prefill(
                logits, start, case.seen, lists, case.tokens, columns, 1, k
            ),
            "persistent": lambda: ops.persistent_topk(logits, lens, lists, workspace, k, columns),
        }
        if case.tokens <= 32:
            calls["cooperative"] = lambda: ops.cooperative_topk(logits, lens, lists, workspace, k, columns)
        for name, work in calls.items():
            lists.fill_(-1)
            work()
            right = recall(lists, logits, case.seen, k)
            yield f"lists, {name}, recall {right:.3f}", Recording(work)


def kernels_of_vllm(wheels, pattern):
    """A module of vLLM that needs nothing of it but Triton, out of an installed package or an unpacked wheel."""
    place = pathlib.Path(pattern)
    found = next(pathlib.Path(wheels).rglob(pattern), None) if wheels else None
    if not found:
        return importlib.import_module(".".join(place.with_suffix("").parts))
    import triton

    package, utilities = types.ModuleType("vllm"), types.ModuleType("vllm.triton_utils")
    utilities.triton, utilities.tl = triton, triton.language
    spec = importlib.util.spec_from_file_location(place.stem, found)
    module = importlib.util.module_from_spec(spec)
    with unittest.mock.patch.dict(sys.modules, {"vllm": package, "vllm.triton_utils": utilities}):
        spec.loader.exec_module(module)
    return module


class VllmLayer:
    """A decode step of a sparse layer as vLLM makes it, in one graph, from the latents to the heads' values.

    The rows of both caches by one kernel, W_UK, the index queries' projection, their rotation and quantisation by
    another one, DeepGEMM's logits, vLLM's selection and translation, FlashMLA on heads padded to 64, W_UV. The
    schedules of DeepGEMM and FlashMLA are those of the step, which all layers share, or made in it.
    """

    def __init__(self, wheels):
        self.gemm = DeepGemm(wheels).library
        for pattern in "_C_stable_libtorch*.so*", "_flashmla_C*.so*":
            torch.ops.load_library(find(wheels, pattern, "vllm"))
        self.kernels = kernels_of_vllm(wheels, "vllm/models/deepseek_v32/nvidia/kernels.py")
        self.slots = kernels_of_vllm(wheels, "vllm/v1/attention/backends/mla/sparse_utils.py")
        self.forward = torch.ops._flashmla_C.sparse_decode_fwd

    def parts(self, case):
        if case.layer["kv"] != "fp8_ds_mla" or set(case.query_lens) != {1}:
            raise ValueError("it takes caches of fp8_ds_mla, and one query token of each request")
        step = VllmStep(self, case)
        for mixed in True, False:
            name = "layer, queries as one request" if mixed else "layer"
            plans = step.plans(mixed)
            finite = step.run(mixed, plans).isfinite().all().item()
            if not finite:
                raise ValueError("its outputs are not finite")
            yield name, Recording(lambda: step.run(mixed, plans))
            yield f"{name}, with its plans", Recording(lambda: step.run(mixed, None))


class VllmStep:
    def __init__(self, peer, case):
        self.peer, self.case = peer, case
        heads, rank = case.layer["heads"], case.layer["query_rank"]
        pages = -(-case.longest // PAGE)
        slots = case.requests * pages * PAGE
        self.padded = 64 if heads <= 64 else 128
        self.heads, self.lens = heads, case.seen.view(-1, 1)
        self.position = case.seen.long() - 1
        self.table = torch.randperm(case.requests * pages, device="cuda").to(torch.int32).view(case.requests, pages)
        page = self.table.gather(1, (self.position // PAGE)[:, None]).long().flatten()
        self.slot = page * PAGE + self.position % PAGE
        keys, scales = case.keys(slots)
        rows = keys.view(torch.uint8).view(-1, PAGE * WIDTH), scales.view(-1, PAGE).view(torch.uint8)
        self.index_cache = torch.cat(rows, 1).view(-1, PAGE, WIDTH + 4)
        self.cache = torch.empty(slots, 656, dtype=torch.uint8, device="cuda")
        for row in self.cache.split(1 << 18):
            row[:, :LATENT] = torch.empty(len(row), LATENT, device="cuda").normal_().to(E4M3).view(torch.uint8)
            row[:, LATENT : LATENT + 16] = torch.full((len(row), 4), 0.1, device="cuda").view(torch.uint8)
            row[:, LATENT + 16 :] = normal(len(row), ROPE, deviation=0.1).view(torch.uint8)
        self.cache = self.cache.view(-1, PAGE, 656)
        tokens = case.tokens
        self.latents = normal(tokens, rank, deviation=1), normal(tokens, LATENT, deviation=1)
        self.norms = normal(rank, deviation=1), normal(LATENT, deviation=1)
        self.rope_key, self.index_key = normal(tokens, ROPE, deviation=1), normal(tokens, WIDTH, deviation=1)
        self.index_norm = torch.randn(2, WIDTH, device="cuda")
        self.table_of_angles = torch.randn(case.longest, ROPE, device="cuda").to(DTYPE)
        self.nope, self.rope = normal(tokens, heads, NOPE, deviation=0.1), normal(tokens, heads, ROPE, deviation=0.1)
        self.up = normal(heads, NOPE, LATENT, deviation=0.05), normal(heads, LATENT, VALUE, deviation=0.05)
        self.projection = normal(rank, case.heads * WIDTH, deviation=0.02)
        self.head_weights = normal(tokens, case.heads, deviation=1)
        self.lists = torch.full((tokens, case.topk), -1, dtype=torch.int32, device="cuda")
        self.requests = torch.arange(tokens, dtype=torch.int32, device="cuda")
        self.queries = torch.zeros(tokens, self.padded, ROW, dtype=DTYPE, device="cuda")
        self.workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        self.one = torch.ones(1, device="cuda")

    def schedule(self):
        multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        return self.peer.gemm.get_paged_mqa_logits_metadata(self.lens, PAGE, multiprocessors)

    def plans(self, mixed):
        *_, schedule, splits = self.attend(self.lists, mixed, (None, None))
        return self.schedule(), (schedule, splits)

    def attend(self, slots, mixed, plan):
        shape = (1, len(self.queries)) if mixed else (len(self.queries), 1)
        queries, slots = self.queries.view(*shape, self.padded, ROW), slots.view(*shape, -1)
        rows = self.cache.view(-1, PAGE, 1, 656).view(E4M3)
        # q, rows, lists, their lengths, sinks, the plan, a second cache, its lists and lengths, width, scale, out
        return self.peer.forward(queries, rows, slots, None, None, *plan, None, None, None, LATENT, SCALE, None)

    def select(self, logits):
        ops, case = torch.ops._C, self.case
        call = ops.cooperative_topk if case.tokens <= 32 else ops.persistent_topk
        call(logits, self.lens, self.lists, self.workspace, case.topk, case.longest)
        return self.peer.slots.triton_convert_req_index_to_global_index(
            self.requests, self.table, self.lists, PAGE, case.topk
        )

    def run(self, mixed, plans):
        kernels, case, angles = self.peer.kernels, self.case, self.table_of_angles
        kernels.fused_norm_rope(
            self.position, self.latents[0], self.norms[0], 1e-6, self.latents[1], self.norms[1], 1e-6, self.rope_key,
            angles, self.index_key, *self.index_norm, 1e-6, angles, self.lists, slot_mapping=self.slot,
            indexer_k_cache=self.index_cache, mla_kv_cache=self.cache, mla_kv_cache_dtype="fp8_ds_mla",
        )
        nope = torch.bmm(self.nope.transpose(0, 1), self.up[0]).transpose(0, 1)
        queries = (self.latents[0] @ self.projection).view(-1, case.heads, WIDTH)
        queries, weights, rope = kernels.fused_q(
            self.position, self.rope, angles, queries, angles, nope, self.one, self.head_weights, WIDTH**-0.5,
            case.heads**-0.5, quantize_mqa=False,
        )
        schedule, plan = plans or (self.schedule(), (None, None))
        cache = self.index_cache.view(-1, PAGE, 1, WIDTH + 4)
        logits = self.peer.gemm.fp8_fp4_paged_mqa_logits(
            (queries.view(-1, 1, case.heads, WIDTH), None), cache, weights, self.lens, self.table, schedule,
            case.longest, clean_logits=False,
        )
        slots = self.select(logits)
        torch.cat((nope, rope), -1, out=self.queries[:, : self.heads])
        out = self.attend(slots, mixed, plan)[0].view(-1, self.padded, LATENT)[:, : self.heads]
        return torch.bmm(out.transpose(0, 1), self.up[1])


INDEX_PEERS = {"deepgemm": DeepGemm, "vllm": Vllm, "torch": Torch, "vllm-layer": VllmLayer}


def main_of_indexer():
    given = json.loads(sys.argv[1])
    case = IndexCase(given)
    torch.manual_seed(0)
    filler = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    say(torch=torch.__version__, loaded=given["peers"])
    for name in given["peers"]:
        try:
            for part, recording in INDEX_PEERS[name](given["wheels"]).parts(case):
                say(peer=name, id=part, e2e_us=recording.times(filler, given["warm_up"], given["samples"]))
                torch.cuda.empty_cache()
        except Exception as error:
            say(peer=name, refused=f"{type(error).__name__}: {error}")
    say(done="")


if __name__ == "__main__":
    main_of_indexer()
