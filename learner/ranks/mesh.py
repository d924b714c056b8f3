"""How the ranks of a learner are arranged: who holds which share of the parameters, and who trains which part of a
batch. The only place that knows.

    4 ranks, 2 replicas       share 0   share 1
                  replica 0   rank 0    rank 1     gather weights from one another before a layer runs
                  replica 1   rank 2    rank 3     the same values once more

After a layer's backward pass gradients are added up over the shares of each replica, then over the replicas. The ranks
of a replica have consecutive numbers: where each host has a replica, gathering stays within the host. Replica 0, with
rank 0 in it, acts for all: it alone sends weights and writes checkpoints.

Independently of this, `context` ranks with consecutive numbers train the same part of a batch: each has some tokens of
every sequence of it (models.divided).
"""

# Why it is so: docs/decisions/learner-ranks.md

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh  # takes a second to load


class Mesh(NamedTuple):
    """Arrangement of `world_size` ranks in `replicas`."""

    world_size: int = 1
    replicas: int = 1
    context: int = 1

    @classmethod
    def of(cls, size: int, replicas: int, context: int = 1) -> Mesh:
        """Raises ValueError unless all replicas get the same number of ranks, and all parts of a batch."""
        if size % replicas:
            raise ValueError(f"got {size} ranks in {replicas} replicas; expected a multiple of {replicas} ranks")
        if size % context:
            raise ValueError(f"got {size} ranks, {context} to a sequence; expected a multiple of {context} ranks")
        return cls(size, replicas, context)

    @property
    def shares(self) -> int:
        """Into how many shares each parameter is divided: the ranks of a replica."""
        return self.world_size // self.replicas

    def share(self, rank: int) -> int:
        """Which share of the parameters a rank holds."""
        return rank % self.shares

    def writes(self, rank: int) -> bool:
        """Whether this rank sends and writes its share. Exactly one of those who hold it does."""
        return rank < self.shares

    @property
    def parts(self) -> int:
        """Into how many parts a batch is divided."""
        return self.world_size // self.context

    def part(self, rank: int) -> int:
        """Which part of each batch a rank trains, alone or with others."""
        return rank // self.context

    @property
    def context_groups(self) -> list[list[int]]:
        """The ranks that train the same part, by part; none if each trains one alone."""
        if self.context == 1:
            return []
        return [list(range(first, first + self.context)) for first in range(0, self.world_size, self.context)]

    def of_devices(self, kind: str) -> DeviceMesh:
        """torch's view of it, for FSDP, which divides parameters along the last dimension and copies them along the
        first of two. All ranks call it at the same time. `kind`: cpu or cuda."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.replicas == 1:
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("share",))
        return init_device_mesh(kind, (self.replicas, self.shares), mesh_dim_names=("replica", "share"))
