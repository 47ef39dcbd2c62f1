"""Requests that have to leave a full cache: onto the host, where there is room, or to be computed anew."""

from collections.abc import Sequence
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from .batch_cache import BatchCache


class BatchOffload:
    """What transformers' continuous batching asks of its OffloadingManager (5.23), for a BatchCache.

    A request that leaves is the newest of those that found no room. On the host it keeps its pages as they are stored, so
    that it goes on later as if it had never left; computed anew, its sealed pages are found again if the prefix store still
    has them.

    Args:
        host_bytes: that requests may take on the host; 0: they are computed anew.
    """

    def __init__(self, cache: BatchCache, scheduler: Any, host_bytes: int) -> None:
        self.cache, self.scheduler, self.host_bytes = cache, scheduler, host_bytes

    def offload_requests(self) -> bool:
        """Let the newest starved requests leave until the others find room; say whether one left."""
        starved = self.scheduler.starved_requests
        needs = [(state.request_id, state.current_len() + count) for state, count in starved]
        active = len(self.scheduler.active_requests)
        gone: list[tuple[RequestState, RequestState]] = []
        while starved and active - len(gone) > 1:
            if self.cache.count_storable_requests(needs) == len(starved):
                break
            state, _ = starved.pop()
            needs.pop()
            gone.append((state, self._leave(state)))
        for old, new in reversed(gone):
            self.scheduler.active_requests.pop(old.request_id, None)
            self.scheduler.add_waiting_request(new)
        if gone:
            self.scheduler.block_new_requests = True
        return bool(gone)

    def _leave(self, state: RequestState) -> RequestState:
        """Take a request's row from it; return the request that waits in its place."""
        request_id = state.request_id
        fits = self.cache.bytes_away() + self.cache.request_bytes(request_id) <= self.host_bytes
        if not fits:
            self.cache.requests_evicted += 1
            salt = self.cache.salt_of(request_id)
            self.cache.free_blocks(request_id)
            self.cache.salt(request_id, salt)
            fresh = state.create_equivalent_initial_request()
            state._status = RequestStatus.FINISHED
            return fresh
        self.cache.requests_moved += 1
        self.cache.take_away(request_id)
        if state._status == RequestStatus.DECODING:
            # the next token is known: computed again on return, it goes on where it was
            state.remaining_prefill_tokens = state.tokens_to_process[:]
        state._status = RequestStatus.PENDING  # not by the setter, which stamps times
        state.is_cpu_offloaded = True
        return state

    def restore_scheduled_requests(self, requests_in_batch: Sequence[Any]) -> None:
        """Note which requests are back; the cache took them in when it promised them room."""
        for future in requests_in_batch:
            future.state.is_cpu_offloaded = False

    def free_request_cpu_cache(self, state: RequestState) -> None:
        """Forget what a cancelled request holds on the host."""
        self.cache.free_blocks(state.request_id)

    def free_all_waiting_cpu_caches(self) -> None:
        """Forget what waiting requests hold on the host."""
        for request_id in list(self.scheduler.waiting_requests):
            self.cache.free_blocks(request_id)

    def reset(self) -> None:
        """Forget all requests on the host."""
        self.free_all_waiting_cpu_caches()
