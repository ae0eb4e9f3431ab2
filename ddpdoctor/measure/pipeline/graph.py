"""Build the dependency graph of steps of pipeline- and data-parallel training from a table of operations.

The dependencies are those of Megatron's pipeline schedules as modelled in the what-if analysis of Lin et al.,
"Understanding Stragglers in Large Model Training Using What-if Analysis", OSDI '25, section 3. A *worker* is a
stage of a replica. It has one stream for computation, one for each kind of send and receive, and one for the exchange
of parameters and gradients with the other replicas.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from ddpdoctor.trace.operations import Operations

from .dag import ALONE, Dag, Edges, Indices, build_dag, order_edges

FORWARD, BACKWARD = "forward-compute", "backward-compute"
GATHER, REDUCE = "params-all-gather", "grads-reduce-scatter"
LAYER_NORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
SEPARATE, CLIP, OPTIMIZER = "separate-grads-all-reduce", "optimizer-clip-main-grad", "optimizer"
COLLECTION = "gc"
PEER_TO_PEER = ("forward-send", "forward-recv", "backward-send", "backward-recv")
COMMUNICATION = (*PEER_TO_PEER, GATHER, REDUCE, SEPARATE, LAYER_NORM, EMBEDDING, CLIP)
"""Kinds whose duration is communication. Only one rank of each ``layernorm-grads-all-reduce`` is traced, so it is replayed as a
single operation."""
KINDS = (*COMMUNICATION, FORWARD, BACKWARD, COLLECTION, OPTIMIZER)


class _Channel(msgspec.Struct, frozen=True):
    """One kind of send or receive between neighbouring model chunks *c* (upper) and *c* + 1 (lower)."""

    kind: str
    computation: str
    """Kind of computation that produces the sent data, or uses the received data."""
    lower: bool
    """Whether the operation is at chunk *c* + 1."""

    @property
    def receives(self) -> bool:
        return self.kind.endswith("recv")


_CHANNELS = (
    _Channel("forward-send", FORWARD, lower=False),
    _Channel("forward-recv", FORWARD, lower=True),
    _Channel("backward-send", BACKWARD, lower=True),
    _Channel("backward-recv", BACKWARD, lower=False),
)


class _MessageEnds(msgspec.Struct, frozen=True):
    """Sends or receives, and the computation of each."""

    messages: Indices
    computations: Indices
    boundary: Indices
    """Upper chunk of the two between which the message is sent; ``ALONE`` without a neighbour, so that nothing was sent."""
    unmatched: Indices
    """Steps in which a worker's numbers of messages and computations differ."""


def whole_steps(ops: Operations) -> NDArray[np.bool_]:
    """Return [N] whether the operation is in a complete step: every worker ran its optimizer, and every message has its computation and its
    other end."""
    worker = _key(ops.replica, ops.stage)
    finished = ops.of_kind(OPTIMIZER)
    steps, seen = np.unique(
        np.unique(np.stack([ops.step[finished], worker[finished]]), axis=1)[0], return_counts=True
    )
    good = steps[seen == len(np.unique(worker))]
    attached = [_match_messages(ops, channel) for channel in _CHANNELS]
    broken = np.concatenate([ends.unmatched for ends in attached])
    message = _messages(ops, attached)
    numbers, counts = np.unique(message[message != ALONE], return_counts=True)
    unpaired = ops.step[np.isin(message, numbers[counts != 2])]
    whole: NDArray[np.bool_] = np.isin(ops.step, good) & ~np.isin(
        ops.step, np.concatenate([broken, unpaired])
    )
    return whole


def pipeline_dag(ops: Operations) -> Dag:
    """Build the graph of complete steps. Its operation *v* is row *v* of ``ops``.

    Raises UnusableInput if operations wait for each other in a cycle.
    """
    worker = _key(ops.step, ops.replica, ops.stage)
    attached = [_match_messages(ops, channel) for channel in _CHANNELS]
    edges = [
        order_edges(_key_if_kind(ops, worker, FORWARD, BACKWARD), ops.start_s, ops.sequence),
        order_edges(_key_if_kind(ops, worker, GATHER, REDUCE), ops.start_s, ops.sequence),
        *(order_edges(_key_if_kind(ops, worker, kind), ops.start_s, ops.sequence) for kind in PEER_TO_PEER),
        *(
            _message_edges(ops, worker, channel, ends)
            for channel, ends in zip(_CHANNELS, attached, strict=True)
        ),
        *_first_backward(ops, worker),
        _edges_by_key(*_last_by_chunk(ops, GATHER), *_first_by_chunk(ops, FORWARD)),
        *_after_compute(ops, worker),
    ]
    return build_dag(ops.size, edges, _collectives(ops, attached))


def _key(*columns: Indices) -> Indices:
    """[N] a number that identifies the combination of values of the columns."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        low = int(column.min(initial=0))
        code = code * (int(column.max(initial=0)) - low + 1) + column - low
    _, dense = np.unique(code, return_inverse=True)
    return dense.astype(np.int64)


def _key_if_kind(ops: Operations, key: Indices, *kinds: str) -> Indices:
    return np.where(ops.of_kind(*kinds), key, ALONE)


def _match_messages(ops: Operations, channel: _Channel) -> _MessageEnds:
    """Assign messages to computations. A worker's n-th message belongs to its n-th computation with a neighbour; if messages were also
    recorded for computations without a neighbour, to its n-th computation of all."""
    worker = _key(ops.step, ops.replica, ops.stage)
    workers = int(worker.max(initial=-1)) + 1
    # Unrecorded model chunks are assigned to the stages round-robin.
    round_robin = np.maximum(ops.chunk, 0) * (int(ops.stage.max(initial=0)) + 1) + ops.stage
    model_chunk = np.where(ops.model_chunk < 0, round_robin, ops.model_chunk)
    last_chunk = int(model_chunk.max(initial=0))
    boundary = model_chunk - 1 if channel.lower else model_chunk
    has_neighbour = (boundary >= 0) & (boundary < last_chunk)
    messages, computations = ops.of_kind(channel.kind), ops.of_kind(channel.computation)
    sent = np.bincount(worker[messages], minlength=workers)
    for_all = sent == np.bincount(worker[computations], minlength=workers)
    computations &= has_neighbour | for_all[worker]
    fits = sent == np.bincount(worker[computations], minlength=workers)
    rows = [
        _sorted_rows(np.flatnonzero(mask & fits[worker]), worker, ops.sequence)
        for mask in (messages, computations)
    ]
    return _MessageEnds(
        rows[0],
        rows[1],
        np.where(has_neighbour[rows[1]], boundary[rows[1]], ALONE),
        np.unique(ops.step[~fits[worker]]),
    )


def _sorted_rows(rows: Indices, *keys: NDArray[np.generic]) -> Indices:
    return rows[np.lexsort([key[rows] for key in reversed(keys)])]


def _message_edges(ops: Operations, worker: Indices, channel: _Channel, ends: _MessageEnds) -> Edges:
    """A send waits for its computation. A computation waits for its receive, which is posted after the previous computation of the same
    kind."""
    if not channel.receives:
        return ends.computations, ends.messages
    before, after = order_edges(_key_if_kind(ops, worker, channel.computation), ops.sequence)
    previous = np.full(ops.size, ALONE)
    previous[after] = before
    earlier = previous[ends.computations]
    known = earlier != ALONE
    return (
        np.concatenate([ends.messages, earlier[known]]),
        np.concatenate([ends.computations, ends.messages[known]]),
    )


def _first_backward(ops: Operations, worker: Indices) -> list[Edges]:
    """The first messages of the backward pass are posted with the last forward pass of the warm-up, so they wait for the computation before
    that one."""
    order = _sorted_rows(np.flatnonzero(ops.of_kind(FORWARD, BACKWARD)), worker, ops.start_s, ops.sequence)
    backward = np.flatnonzero(ops.of_kind(BACKWARD)[order])
    workers, first = np.unique(worker[order[backward]], return_index=True)
    position = backward[first]
    enough = position - np.searchsorted(worker[order], workers) >= 2
    workers, two_before = workers[enough], order[position[enough] - 2]
    edges = []
    for kind in ("backward-recv", "backward-send"):
        messages = _sorted_rows(np.flatnonzero(ops.of_kind(kind)), worker, ops.sequence)
        edges.append(_edges_by_key(workers, two_before, *_first_per_key(worker[messages], messages)))
    return edges


def _first_per_key(keys: Indices, rows: Indices) -> tuple[Indices, Indices]:
    """(Distinct keys, the first of the ``rows`` with each key.)"""
    unique, at = np.unique(keys, return_index=True)
    return unique, rows[at]


def _by_chunk(ops: Operations, *kinds: str) -> tuple[Indices, Indices]:
    """(Keys of step, worker and chunk, rows) of all operations of these kinds, in order of start."""
    rows = _sorted_rows(np.flatnonzero(ops.of_kind(*kinds)), ops.start_s, ops.sequence)
    return _key(ops.step, ops.replica, ops.stage, ops.chunk)[rows], rows


def _first_by_chunk(ops: Operations, kind: str) -> tuple[Indices, Indices]:
    return _first_per_key(*_by_chunk(ops, kind))


def _last_by_chunk(ops: Operations, kind: str) -> tuple[Indices, Indices]:
    keys, rows = _by_chunk(ops, kind)
    return _first_per_key(keys[::-1], rows[::-1])


def _edges_by_key(keys: Indices, rows: Indices, other_keys: Indices, other_rows: Indices) -> Edges:
    """Edges from ``rows`` to the ``other_rows`` with the same key. Keys are unique on both sides."""
    _, here, there = np.intersect1d(keys, other_keys, assume_unique=True, return_indices=True)
    return rows[here], other_rows[there]


def _after_compute(ops: Operations, worker: Indices) -> list[Edges]:
    """Edges of the end of a step: on each worker, one operation after the other, after its last computation. If gradients are reduced
    during the backward pass (as ``separate-grads-all-reduce`` shows), these operations wait for the reduction; else it is one of them."""
    overlapped = SEPARATE in ops.kinds
    tail = [COLLECTION, LAYER_NORM, EMBEDDING, SEPARATE if overlapped else REDUCE, CLIP, OPTIMIZER]
    place = np.full(ops.size, ALONE)
    for i, kind in enumerate(tail, start=1):
        place[ops.of_kind(kind)] = i
    place[_last_by_worker(ops, worker, FORWARD, BACKWARD)[1]] = 0
    edges = [order_edges(np.where(place == ALONE, ALONE, worker), place, ops.start_s, ops.sequence)]
    if overlapped:
        edges.append(_edges_by_key(*_last_by_chunk(ops, BACKWARD), *_first_by_chunk(ops, REDUCE)))
        waiting = _sorted_rows(np.flatnonzero(place >= 2), worker, place, ops.start_s)
        edges.append(
            _edges_by_key(*_last_by_worker(ops, worker, REDUCE), *_first_per_key(worker[waiting], waiting))
        )
    return edges


def _last_by_worker(ops: Operations, worker: Indices, *kinds: str) -> tuple[Indices, Indices]:
    """(Workers, row of each one's last operation of these kinds.)"""
    rows = _sorted_rows(np.flatnonzero(ops.of_kind(*kinds)), worker, ops.start_s, ops.sequence)[::-1]
    return _first_per_key(worker[rows], rows)


def _messages(ops: Operations, attached: list[_MessageEnds]) -> Indices:
    """[N] number of the message that the operation sends or receives, by step, replica, direction, chunk and micro-batch; ``ALONE`` for
    other operations."""
    message = np.full(ops.size, ALONE)
    key = np.stack([message] * 5)
    for channel, ends in zip(_CHANNELS, attached, strict=True):
        real = ends.boundary != ALONE
        rows, computations = ends.messages[real], ends.computations[real]
        key[:, rows] = (
            ops.step[rows],
            ops.replica[rows],
            np.full(len(rows), channel.computation == FORWARD, np.int64),
            ends.boundary[real],
            ops.micro_batch[computations],
        )
        message[rows] = 0
    is_end = message != ALONE
    message[is_end] = _key(*(column[is_end] for column in key))
    return message


def _collectives(ops: Operations, attached: list[_MessageEnds]) -> Indices:
    """[N] number of the collective or message that the operation is a part of; ``ALONE`` for single operations."""
    numbers = _messages(ops, attached)
    nothing = np.zeros(ops.size, np.int64)
    for kinds, key in (
        ((GATHER, REDUCE, SEPARATE), _key(ops.step, ops.stage, ops.kind, ops.sequence)),
        ((EMBEDDING,), _key(ops.step, ops.replica, ops.sequence)),
        ((CLIP,), _key(ops.step, nothing, ops.sequence)),
    ):
        chosen = ops.of_kind(*kinds)
        numbers[chosen] = key[chosen] + numbers.max(initial=ALONE) + 1
    return numbers
