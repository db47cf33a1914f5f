# Written by `make stubs` from the compiled module; do not edit.
import collections.abc

AHEAD_SMS: int
HEADER_INTS: int
MAP_BANDS: int
MAX_CHUNKS: int
MAX_DEVICE_OPS: int
MAX_DEVICE_RANKS: int
MAX_DEVICE_SLICES: int
MOST_MAIL_SLICES: int
cuda_archs: str
route_max_experts: int
route_max_top_k: int

class AheadArgs:
    def __init__(self, x: int, tokens: int) -> None: ...

class CollectArgs:
    def __init__(
        self,
        lists: RouteLists,
        y: int,
        flat: bool,
        part_weights: int,
        nest: int,
        z: int,
        dtype: int,
        wire: int,
        out_dtype: int,
        hidden: int,
    ) -> None: ...

class CountSlots:
    def __init__(self, table: TableView, wide: bool, tokens: int, top_k: int, domains: int) -> None: ...
    def in_memory(
        self, topk_idx: int, weights: int, stamp: tuple[int, int, int, int], memory: int, masked: int
    ) -> CountSlots: ...
    @property
    def said_ints(self) -> int: ...

class DeliverArgs:
    def __init__(
        self,
        lists: RouteLists,
        x: int,
        registered: int,
        offers_all: bool,
        out: int,
        num_rows: int,
        flat: bool,
        weights: int,
        dot_with: int,
        dots: int,
        dtype: int,
        hidden: int,
    ) -> None: ...

class DeviceWorld:
    def __init__(
        self,
        shape: WindowShape,
        first_rank: int,
        hosted: int,
        windows: int,
        states: int,
        reports: int,
        moved: int,
    ) -> None: ...

class Error(ValueError): ...

class FaultRecord:
    def __init__(self) -> None: ...
    @property
    def awaited(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def got(self) -> tuple[int, int, int]: ...
    @property
    def op(self) -> int: ...
    @property
    def status(self) -> str: ...
    @property
    def waiter(self) -> int: ...
    @property
    def want(self) -> tuple[int, int, int]: ...
    @property
    def word(self) -> str: ...

class HostWindows:
    def __init__(
        self,
        shape: WindowShape,
        windows: collections.abc.Sequence[int],
        hosted: collections.abc.Sequence[int],
    ) -> None: ...
    def collect(
        self, args: collections.abc.Sequence[CollectArgs], op: int, seconds: float, lanes: int
    ) -> list[Report]: ...
    def deliver(
        self, args: collections.abc.Sequence[DeliverArgs], op: int, seconds: float, lanes: int
    ) -> list[Report]: ...
    def exchange_records(
        self, args: collections.abc.Sequence[RecordArgs], op: int, seconds: float
    ) -> list[Report]: ...
    def leave(self) -> None: ...
    def publish(
        self, args: collections.abc.Sequence[PublishArgs], op: int, seconds: float
    ) -> list[Report]: ...
    @property
    def epoch(self) -> int: ...

class Integers:
    def __init__(self, values: int, wide: bool) -> None: ...

class Moved:
    def __init__(self) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def rail_bytes(self) -> int: ...
    @property
    def rail_rows(self) -> int: ...
    @property
    def rows(self) -> int: ...

class NotBuilt(RuntimeError): ...

class OneSidedPlan:
    def __init__(
        self,
        setup: OneSidedSetup,
        rank: int,
        first_place: int,
        places: int,
        tokens: int,
        has_weights: bool,
        left: int,
        received: int,
        rows: int,
    ) -> None: ...
    def in_memory(
        self, counted: CountSlots, weights: int, said: int, kept: int, scratch: int, arrived_weights: int
    ) -> OneSidedPlan: ...
    def lists(self) -> RouteLists: ...

class OneSidedSetup:
    def __init__(
        self,
        table: TableView,
        top_k: int,
        alignment: int,
        capacity: int,
        flat: bool,
        on_device: bool,
        tokens_at: int,
    ) -> None: ...

class PublishArgs:
    def __init__(self, ints: int, count: int, all: int) -> None: ...

class RecordArgs:
    def __init__(
        self, send: int, send_splits: int, recv: int, recv_splits: int, record_bytes: int
    ) -> None: ...

class Report:
    def __init__(self) -> None: ...
    @property
    def fault(self) -> FaultRecord: ...
    @property
    def moved(self) -> Moved: ...
    @property
    def status(self) -> str: ...

class RouteLists:
    def __init__(
        self,
        tokens_of: int,
        token: int,
        base: int,
        rows: int,
        top_k: int,
        row_src: int,
        home_rank: int,
        relay_token: int,
        relay_base: int,
        relay_members: int,
    ) -> None: ...

class RouteRule:
    def __init__(
        self,
        score: int,
        top_k: int,
        num_groups: int,
        topk_groups: int,
        top2: bool,
        renormalize: bool,
        scaling: float,
    ) -> None: ...

class SendAhead:
    def __init__(self, world: DeviceWorld, windows: collections.abc.Sequence[int]) -> None: ...
    def join(self, stream: int) -> None: ...
    def start(
        self, args: collections.abc.Sequence[AheadArgs], op: int, seconds: float, stream: int
    ) -> None: ...

class SendOrder:
    def __init__(
        self,
        rows: int,
        top_k: int,
        owners: int,
        unit: int,
        split: int,
        num_send: int,
        order: int,
        slot_send: int,
        send_row: int,
        send_first: int,
        send_token: int,
    ) -> None: ...

class SentCounts:
    def __init__(self, counts: int, stride: int, ranks: int, domains: int) -> None: ...

class SlotsToCount:
    def __init__(
        self, steps: collections.abc.Sequence[CountSlots], boards: collections.abc.Sequence[int], op: int
    ) -> None: ...

class TableView:
    def __init__(
        self, experts: int, ranks: int, place_of_expert: int, rank_of_place: int, rank_begin: int
    ) -> None: ...

class WindowBroken(RuntimeError): ...
class WindowBusy(RuntimeError): ...

class WindowShape:
    def __init__(
        self,
        ranks: int,
        domain_size: int,
        slices: int,
        slots: int,
        pull_tokens: int,
        push_tokens: int,
        pull_row_bytes: int,
        push_row_bytes: int,
        mail_bytes: int,
        board_ints: int,
        registered_rows: int,
        landed_rows: int,
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def registered_at(self) -> int: ...

def assign_rows(
    table: TableView,
    topk_idx: Integers,
    number: int,
    place_counts: int,
    base: int,
    start: int,
    cut: int,
    domains: int,
    weights: int,
    has_weights: bool,
    slot_row: int,
    slot_rank: int,
    order: SendOrder,
    send_counts: int,
    meta: int,
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
def count_and_plan_on_device(
    world: DeviceWorld,
    slots: SlotsToCount,
    ranks: collections.abc.Sequence[OneSidedPlan],
    counts_op: int,
    records_op: int,
    seconds: float,
    stream: int,
) -> None: ...
def count_on_device(world: DeviceWorld, slots: SlotsToCount, seconds: float, stream: int) -> None: ...
def count_peers(
    sent: SentCounts,
    tokens: int,
    tokens_stride: int,
    rank: int,
    tokens_of: int,
    send: int,
    recv: int,
    recv_base: int,
    rail_out: int,
    rail_in: int,
    member_out: int,
    member_in: int,
    arrival: int,
    relay_base: int,
    stream: int | None,
) -> None: ...
def count_slots(step: CountSlots, stream: int | None) -> None: ...
def dequantize_rows(
    out: int,
    out_dtype: int,
    payload: tuple[int, int, int],
    scales: int,
    rows: int,
    hidden: int,
    threads: int,
    stream: int | None,
) -> None: ...
def device_collect(
    world: DeviceWorld, args: collections.abc.Sequence[CollectArgs], op: int, seconds: float, stream: int
) -> None: ...
def device_deliver(
    world: DeviceWorld, args: collections.abc.Sequence[DeliverArgs], op: int, seconds: float, stream: int
) -> None: ...
def device_exchange_records(
    world: DeviceWorld, args: collections.abc.Sequence[RecordArgs], op: int, seconds: float, stream: int
) -> None: ...
def device_fault(world: DeviceWorld) -> FaultRecord | None: ...
def device_leave(world: DeviceWorld, stream: int) -> None: ...
def device_publish(
    world: DeviceWorld, args: collections.abc.Sequence[PublishArgs], op: int, seconds: float, stream: int
) -> None: ...
def device_report_bytes(hosted: int) -> int: ...
def device_state_bytes(shape: WindowShape, hosted: int) -> int: ...
def dot_rows(
    out: int, a: tuple[int, int, int], b: tuple[int, int, int], idx: int, rows: int, hidden: int, threads: int
) -> None: ...
def dot_rows_cuda(
    out: int,
    a: tuple[int, int, int],
    b: tuple[int, int, int],
    b_rows: int,
    idx: int,
    count: int,
    repeat: int,
    hidden: int,
    stream: int,
) -> None: ...
def exact_sizes(
    sent: SentCounts, counts: int, table: TableView, alignment: int, rank: int
) -> tuple[int, int, int, int, int]: ...
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
def expand_rows_cuda(
    out: int,
    src: tuple[int, int, int],
    row_map: int,
    row_src: int,
    weights: int,
    carried: int,
    carried_out: int,
    words: int,
    words_out: int,
    words_a_row: int,
    tokens: int,
    top_k: int,
    rows: int,
    hidden: int,
    stream: int,
) -> None: ...
def first_outside(values: int, count: int, low: int, high: int) -> int: ...
def gather_rows(
    out: int, src: tuple[int, int, int], idx: int, weights: int, rows: int, hidden: int, threads: int
) -> None: ...
def gather_rows_cuda(
    out: int,
    src: tuple[int, int, int],
    src_rows: int,
    idx: int,
    weights: int,
    rows: int,
    hidden: int,
    stream: int,
) -> None: ...
def indices_to_multihot(
    mask: int, probs: int, idx: int, weights: int, tokens: int, top_k: int, experts: int
) -> None: ...
def indices_to_multihot_cuda(
    mask: int, probs: int, idx: Integers, weights: int, tokens: int, top_k: int, experts: int, stream: int
) -> None: ...
def invert_rows(
    rows: int, received: int, top_k: int, num_rows: int, row_src: int, stream: int | None
) -> None: ...
def isa_names() -> list[str]: ...
def kept_ints(setup: OneSidedSetup, tokens: int, left: int, received: int, rows: int) -> list[int]: ...
def multihot_to_indices(
    idx: int, weights: int, mask: int, probs: int, tokens: int, top_k: int, experts: int
) -> int: ...
def multihot_to_indices_cuda(
    idx: int, mask: int, tokens: int, top_k: int, experts: int, stream: int
) -> None: ...
def narrow(out: int, values: int, count: int, low: int, high: int) -> int: ...
def pad_routing_map(out: int, mask: int, tokens: int, experts: int, multiple: int) -> None: ...
def pad_routing_map_cuda(
    out: int, mask: int, counts: int, tokens: int, experts: int, multiple: int, stream: int
) -> None: ...
def plan_on_device(
    world: DeviceWorld,
    ranks: collections.abc.Sequence[OneSidedPlan],
    counts_op: int,
    records_op: int,
    seconds: float,
    stream: int,
) -> None: ...
def plan_on_host(
    windows: HostWindows,
    ranks: collections.abc.Sequence[OneSidedPlan],
    counts_op: int,
    records_op: int,
    seconds: float,
) -> list[list[Report]]: ...
def plan_permutation(
    topk_idx: Integers,
    tokens: int,
    top_k: int,
    experts: int,
    alignment: int,
    capacity: int,
    ids: int,
    row_map: int,
    row_src: int,
    counts: int,
    padded: int,
    dropped: int,
    outside: int,
    num_rows: int,
    workspace: int,
    stream: int | None,
    blocks: int = ...,
    lanes: int = ...,
) -> None: ...
def plan_workspace_ints(experts: int, ranks: int, on_device: bool) -> int: ...
def quantize_rows(
    payload: int,
    scales: int,
    src: tuple[int, int, int],
    row_map: int,
    row_src: int,
    tokens: int,
    top_k: int,
    rows: int,
    hidden: int,
    threads: int,
    stream: int | None,
) -> None: ...
def receive_rows(
    meta: int,
    top_k: int,
    has_weights: bool,
    received: int,
    num_rows: int,
    ranks: int,
    base: int,
    arrival: int,
    experts: int,
    start: int,
    token: int,
    rows: int,
    weights: int,
    expert: int,
    row_src: int,
    row_weights: int,
    row_map: int,
    order: int,
    stream: int | None,
) -> None: ...
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
def reduce_rows_cuda(
    out: int,
    out_dtype: int,
    src: tuple[int, int, int],
    src_rows: int,
    idx: int,
    weights: int,
    groups: int,
    group_dtype: int,
    sort: bool,
    tokens: int,
    top_k: int,
    hidden: int,
    stream: int,
) -> None: ...
def relay_records(
    rail: int,
    has_weights: bool,
    used: int,
    token: int,
    order: SendOrder,
    send_counts: int,
    meta: int,
    workspace: int,
    stream: int | None,
) -> None: ...
def resolve_rows(
    table: TableView,
    counts: int,
    stride: int,
    alignment: int,
    capacity: int,
    base: int,
    start: int,
    kept: int,
    padded: int,
    dropped: int,
    cut: int,
    num_rows: int,
    stream: int | None,
) -> None: ...
def route(
    rule: RouteRule,
    logits: int,
    dtype: int,
    bias: int,
    padding: int,
    tokens: int,
    experts: int,
    ids: int,
    weights: int,
    probs: int,
    threads: int,
    stream: int | None,
) -> None: ...
def route_grad(
    rule: RouteRule,
    logits: int,
    dtype: int,
    ids: int,
    grad_weights: int,
    grad_probs: int,
    grad_probs_stride: int,
    tokens: int,
    experts: int,
    grad_logits: int,
    threads: int,
    stream: int | None,
) -> None: ...
def scratch_ints(setup: OneSidedSetup, tokens: int, left: int, received: int, has_weights: bool) -> int: ...
def segment_map_cuda(
    map: int,
    sizes: int,
    order: int,
    rows: int,
    segments: int,
    out_alignment: int,
    src_alignment: int,
    stream: int,
) -> None: ...
def set_isa(name: str) -> str: ...
def take_columns_cuda(
    out: int, values: int, idx: Integers, tokens: int, top_k: int, experts: int, stream: int
) -> None: ...
def take_cuda(out: int, values: int, num_values: int, index: int, count: int, stream: int) -> None: ...
def transpose_chunks(num_rows: int, outer: int, inner: int, map: int, stream: int | None) -> None: ...
def widest_row(mask: int, tokens: int, experts: int) -> int: ...
