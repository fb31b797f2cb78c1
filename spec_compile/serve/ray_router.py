"""`PrefixRouter`: Ray Serve sends a request to the replica that has read most of its prompt."""

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .prefixes import PrefixMap


class PrefixRouter(RequestRouter):
    """Ray's interface of routers; see `PrefixMap.rank`. The first argument of each request is an `HttpRequest`.

    Ray's own `PrefixCacheAffinityRouter` needs vLLM or SGLang to be installed, and asks an actor for each request.
    """

    def initialize_state(self, most_ahead: int) -> None:
        """Ray calls this with the arguments of the router."""
        self._most_ahead, self._prefixes = most_ahead, PrefixMap()
        self._running: dict[str, ReplicaID] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas; Ray takes the least busy one of the first group with a free place.

        Replicas that the request was sent to before come last.
        """
        replicas = {each.replica_id: each for each in candidate_replicas}
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        sent, running = pending_request.args[0], [*self._running.values()]
        pending_request.routing_context.should_backoff = True
        loads = {each: running.count(each) for each in replicas if each not in sent.tried}
        groups = self._prefixes.rank(sent.keys, loads, self._most_ahead)
        groups.append([each for each in replicas if each in sent.tried])
        return [[replicas[each] for each in group] for group in groups if group]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Ray calls this when a replica has taken a request."""
        if pending_request.args:
            sent = pending_request.args[0]
            sent.tried.append(replica_id)
            self._prefixes.add(sent.keys, replica_id)
            self._running[pending_request.metadata.internal_request_id] = replica_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls this when a request has ended."""
        self._running.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray calls this when a replica has died; another one that has its name starts with an empty cache."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.keep({*self.curr_replicas})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this when replicas have started or ended."""
        super().update_replicas(replicas)
        self._prefixes.keep({*self.curr_replicas})
