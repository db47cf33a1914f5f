# Written by `make stubs` from the compiled module; do not edit.
cuda_archs: str

class Error(ValueError): ...
class NotBuilt(RuntimeError): ...

class TableView:
    def __init__(
        self, experts: int, ranks: int, place_of_expert: int, rank_of_place: int, rank_begin: int
    ) -> None: ...

def assign_rows(
    table: TableView,
    topk_idx: int,
    tokens: int,
    top_k: int,
    base: int,
    start: int,
    cut: int,
    split: int,
    num_send: int,
    slot_row: int,
    slot_rank: int,
    slot_send: int,
    send_row: int,
    send_rank: int,
    send_token: int,
    send_counts: int,
    workspace: int,
    stream: int | None,
) -> None: ...
def compact_rows(
    rows: int,
    rows_rank: int,
    rank: int,
    padded: int,
    top_k: int,
    num_compact: int,
    source: int,
    compact: int,
    workspace: int,
    stream: int | None,
) -> None: ...
def count_slots(
    table: TableView,
    topk_idx: int,
    tokens: int,
    top_k: int,
    counts: int,
    rank_tokens: int,
    workspace: int,
    stream: int | None,
) -> None: ...
def dot_rows(
    out: int, a: tuple[int, int, int], b: tuple[int, int, int], idx: int, rows: int, hidden: int, threads: int
) -> None: ...
def expand_rows(
    out: int,
    src: tuple[int, int, int],
    row_map: int,
    row_src: int,
    weights: int,
    tokens: int,
    top_k: int,
    rows: int,
    hidden: int,
    threads: int,
) -> None: ...
def first_outside(values: int, count: int, low: int, high: int) -> int: ...
def gather_rows(
    out: int, src: tuple[int, int, int], idx: int, weights: int, rows: int, hidden: int, threads: int
) -> None: ...
def indices_to_multihot(
    mask: int, probs: int, idx: int, weights: int, tokens: int, top_k: int, experts: int
) -> None: ...
def invert_rows(
    rows: int, received: int, top_k: int, num_rows: int, row_src: int, stream: int | None
) -> None: ...
def isa_names() -> list[str]: ...
def multihot_to_indices(
    idx: int, weights: int, mask: int, probs: int, tokens: int, top_k: int, experts: int
) -> int: ...
def narrow(out: int, values: int, count: int, low: int, high: int) -> int: ...
def pack_meta(
    slot_row: int,
    slot_send: int,
    send_token: int,
    weights: int,
    has_weights: bool,
    tokens: int,
    top_k: int,
    num_send: int,
    meta: int,
    stream: int | None,
) -> None: ...
def pad_routing_map(out: int, mask: int, tokens: int, experts: int, multiple: int) -> None: ...
def plan_lanes(on_device: bool) -> int: ...
def plan_workspace_ints(experts: int, ranks: int, on_device: bool) -> int: ...
def reduce_rows(
    out: int,
    out_dtype: int,
    src: tuple[int, int, int],
    idx: int,
    weights: int,
    groups: int,
    group_dtype: int,
    sort: bool,
    tokens: int,
    top_k: int,
    hidden: int,
    threads: int,
) -> None: ...
def resolve_rows(
    table: TableView,
    counts: int,
    alignment: int,
    capacity: int,
    base: int,
    start: int,
    kept: int,
    dropped: int,
    cut: int,
    num_rows: int,
    stream: int | None,
) -> None: ...
def set_isa(name: str) -> str: ...
def widest_row(mask: int, tokens: int, experts: int) -> int: ...
