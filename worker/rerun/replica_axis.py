"""Along which axis of the job do ranks run the same program on other data? A rotation moves iterations along it.

A *replica* is a block of ranks that compute one model together: one rank under plain data parallelism or FSDP (its shards are
gathered before they are used, so each rank computes the same function), all tensor- and pipeline-parallel ranks otherwise.
Blocks move as a whole: the rank at position p of one replica hands its data to the rank at position p of another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rsup.worker.rerun.contract import RerunError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ReplicaAxis:
    """`replicas[i][p]` is the global rank at position p of replica i; all replicas are equally long."""

    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for replica in self.replicas for rank in replica]
        if len(set(ranks)) != len(ranks) or len({len(replica) for replica in self.replicas}) != 1:
            raise RerunError(f"replicas {self.replicas} overlap or are not equally large: give a mesh of distinct ranks")

    @classmethod
    def of_world(cls, world_size: int) -> "ReplicaAxis":
        """Every rank is a replica: DDP, or FSDP over the whole world."""
        return cls(tuple((rank,) for rank in range(world_size)))

    @classmethod
    def of_mesh(cls, mesh: "DeviceMesh", dim_names: str | Sequence[str]) -> "ReplicaAxis":
        """The replicas of a mesh, `dim_names` being its data-parallel dims (with FSDP also those that it shards along).

        Raises `RerunError` for a dim that the mesh does not have.
        """
        names = mesh.mesh_dim_names or ()
        wanted = (dim_names,) if isinstance(dim_names, str) else tuple(dim_names)
        missing = [name for name in wanted if name not in names]
        if missing or not wanted:
            raise RerunError(f"the mesh has no dim {', '.join(missing) or '(none given)'}: its dims are {', '.join(names)}")
        first = [names.index(name) for name in wanted]
        rest = [dim for dim in range(mesh.mesh.dim()) if dim not in first]
        grid = mesh.mesh.permute(*first, *rest)
        num_replicas = 1
        for dim in first:
            num_replicas *= mesh.mesh.size(dim)
        return cls(tuple(tuple(row) for row in grid.reshape(num_replicas, -1).tolist()))

    @property
    def size(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    @property
    def replica_size(self) -> int:
        """Ranks a replica: 1 without model parallelism."""
        return len(self.replicas[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of the axis, ascending."""
        return tuple(sorted(rank for replica in self.replicas for rank in replica))

    def replica_of(self, rank: int) -> int:
        """Index of the replica that `rank` belongs to."""
        return self._place(rank)[0]

    def members_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that compute one model together with `rank`, itself among them."""
        return self.replicas[self.replica_of(rank)]

    def counterparts_of(self, rank: int) -> tuple[int, ...]:
        """The ranks at the same position of all replicas, `rank` among them: what is replicated is equal on these."""
        position = self._place(rank)[1]
        return tuple(replica[position] for replica in self.replicas)

    def next_of(self, rank: int, shift: int) -> int:
        """The rank that gets the data of `rank` when all move `shift` replicas on; negative: whose data `rank` gets."""
        replica, position = self._place(rank)
        return self.replicas[(replica + shift) % self.size][position]

    def _place(self, rank: int) -> tuple[int, int]:
        for index, replica in enumerate(self.replicas):
            if rank in replica:
                return index, replica.index(rank)
        raise RerunError(f"rank {rank} is not on the replica axis, whose ranks are {self.ranks}: give a mesh of all ranks")
