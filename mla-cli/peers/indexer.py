# Times published kernels of the indexer beside ours: DeepGEMM's logits, and the top-k of vLLM and torch.
#
# `mla bench indexer --peers` puts peers.py in front of this, whose protocol and helpers these are, and gives one case
# in JSON. A line of JSON goes to standard output for each peer and part: its times, or why it refuses.

WIDTH = 128
E4M3 = torch.float8_e4m3fn


class IndexCase:
    """Queries, index keys in pages of 64 and head weights of a batch, and logits that a selection would get."""

    def __init__(self, case):
        self.query_lens, self.key_lens = zip(*case["requests"])
        self.heads, self.topk = case["heads"], case["topk"]
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
        torch.ops.load_library(shared_object(wheels, "_C_stable_libtorch*.so*", "vllm"))

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


INDEX_PEERS = {"deepgemm": DeepGemm, "vllm": Vllm, "torch": Torch}


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
