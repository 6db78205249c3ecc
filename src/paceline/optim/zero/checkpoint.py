"""State through ``torch.distributed.checkpoint``: each rank writes what it has, and reads its part.

Nothing is brought together. What is elementwise is saved as stretches of a flat tensor, one for
each parameter and name, so that any number of ranks can read any part of it; what is common to a
parameter is saved by the rank that has its first element. ::

    dcp.save({"model": ..., "optimizer": zero.sharded_state_dict()}, checkpoint_id=path)
    zero.load_sharded(path, "optimizer")  # on as many ranks as there are now
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from ..._exchange import memory_like, shaped_like, strides_of
from ...errors import OptimizerStateError
from .pieces import LocalPiece
from .state import Share, elementwise_names, kind_of, on_cpu, shares_of
from .stretches import Slice

if TYPE_CHECKING:
    from torch.distributed.checkpoint import StorageReader


class FlatParts(torch.Tensor):
    """Parts of a flat tensor that other ranks have the rest of, as torch's checkpoints ask for it.

    Its own memory is empty; ``parts`` are the places and the tensors there.
    """

    numel_of_all: int
    parts: dict[int, Tensor]

    @classmethod
    def of(cls, numel: int, parts: Mapping[int, Tensor]) -> Self:
        """Parts by where they begin in a tensor of ``numel`` elements."""
        first = next(iter(parts.values()))
        made: Self = torch.empty(0, dtype=first.dtype).as_subclass(cls)
        made.numel_of_all, made.parts = numel, dict(parts)
        return made

    def size(self, dim: int | None = None) -> Any:
        """Of the whole."""
        return torch.Size([self.numel_of_all]) if dim is None else self.numel_of_all

    def __create_write_items__(self, name: str, _object: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(offsets=torch.Size([at]), sizes=part.size())
            for at, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.parts[index.offset[0]]


class Checkpointed:
    """Saves and loads sharded checkpoints; a part of ZeroRedundancyOptimizer."""

    optim: Any
    param_groups: Any
    _pieces: list[LocalPiece]
    _paired: Any

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, for ``torch.distributed.checkpoint.save``."""
        self._check_overlap_initialized()  # type: ignore[attr-defined]
        params: list[Tensor] = self._index_to_param  # type: ignore[attr-defined]
        stretches: dict[str, dict[int, Tensor]] = {}
        found: dict[str, Any] = {"meta": _packed(self._meta(params))}
        for share in shares_of(self._pieces, self.optim.state):
            index, param = share.part.param, params[share.part.param]
            values, common = _parts_of(share, param)
            for name, value in values.items():
                key = f"state.{index}.{name}"
                stretches.setdefault(key, {})[share.part.start] = value
            if share.part.start == 0:
                found[f"common.{index}"] = _packed([list(share.names), on_cpu(common)])
        for key, parts in stretches.items():
            found[key] = FlatParts.of(params[int(key.split(".")[1])].numel(), parts)
        return found

    def load_sharded(
        self, checkpoint: str | os.PathLike[str] | StorageReader, key: str = "optimizer"
    ) -> None:
        """Load this rank's part of a checkpoint that any number of ranks has saved.

        ``key`` is the key of the optimizer in the checkpoint. Ranks do not wait for each other.
        """
        saved = _Saved(checkpoint, key)
        params: list[Tensor] = self._index_to_param  # type: ignore[attr-defined]
        meta = saved.object("meta")
        _check_layout(meta, params)
        indices = {part.param for piece in self._pieces for part in piece.slices}
        common = {n: saved.object(f"common.{n}") for n in sorted(indices) if f"common.{n}" in saved}
        groups = [
            {**settings, "params": group["params"]}
            for settings, group in zip(meta["groups"], self._packed_groups(), strict=True)
        ]
        torch.optim.Optimizer.load_state_dict(self, {"state": {}, "param_groups": groups})  # type: ignore[arg-type]
        if self._paired is not None:
            shallow = {n: dict.fromkeys(names) | own for n, (names, own) in common.items()}
            self._recut(lambda index: kind_of(index, shallow, params))  # type: ignore[attr-defined]
        self._set_inner_state(saved.states(self._pieces, common, params))  # type: ignore[attr-defined]

    def _packed_groups(self) -> Any:
        return torch.optim.Optimizer.state_dict(self)["param_groups"]  # type: ignore[arg-type]

    def _meta(self, params: Sequence[Tensor]) -> dict[str, Any]:
        groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._packed_groups()
        ]
        layout = [[list(param.shape), list(strides_of(param))] for param in params]
        return {"groups": on_cpu(groups), "layout": layout}


class _Saved:
    """A sharded state in a checkpoint."""

    def __init__(self, checkpoint: Any, key: str) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        path = isinstance(checkpoint, str | os.PathLike)
        self._reader = FileSystemReader(checkpoint) if path else checkpoint
        self._key = key
        self._metadata = self._reader.read_metadata()
        entries = self._metadata.state_dict_metadata
        prefix = f"{key}."
        self._entries: dict[str, Any] = {
            name[len(prefix) :]: entry for name, entry in entries.items() if name.startswith(prefix)
        }
        if "meta" not in self._entries:
            raise OptimizerStateError(
                f"the checkpoint has no sharded optimizer state under {key!r}; it has "
                f"{sorted({name.split('.')[0] for name in entries})}.",
                "Save the result of sharded_state_dict(), and pass its key.",
            )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def object(self, name: str) -> Any:
        """Something that was packed."""
        room = torch.empty(self._entries[name].size, dtype=torch.uint8)
        self._read({name: room})
        return torch.load(io.BytesIO(room.numpy().tobytes()), weights_only=True)

    def states(
        self, pieces: Sequence[LocalPiece], common: Mapping[int, Any], params: Sequence[Tensor]
    ) -> list[dict[str, Any] | None]:
        """For each piece what it is to keep."""
        rooms: dict[str, dict[int, Tensor]] = {}
        for piece in pieces:
            for part in piece.slices:
                for name in self._names(part.param, common):
                    key = f"state.{part.param}.{name}"
                    dtype = self._entries[key].properties.dtype
                    rooms.setdefault(key, {})[part.start] = torch.empty(part.length, dtype=dtype)
        wanted = {
            key: FlatParts.of(params[int(key.split(".")[1])].numel(), parts)
            for key, parts in rooms.items()
        }
        if wanted:
            self._read(wanted)
        return [self._state(piece, common, params, rooms) for piece in pieces]

    def _names(self, index: int, common: Mapping[int, Any]) -> list[str]:
        names = common[index][0] if index in common else []
        return [name for name in names if f"state.{index}.{name}" in self._entries]

    def _state(
        self,
        piece: LocalPiece,
        common: Mapping[int, Any],
        params: Sequence[Tensor],
        rooms: Mapping[str, Mapping[int, Tensor]],
    ) -> dict[str, Any] | None:
        index = piece.slices[0].param
        if index not in common:
            return None
        names, kept = common[index][0], dict(common[index][1])
        for name in self._names(index, common):
            flat = [rooms[f"state.{part.param}.{name}"][part.start] for part in piece.slices]
            value = torch.cat(flat)
            kept[name] = shaped_like(value, params[index]) if piece.is_whole else value
        return {name: kept[name] for name in names}

    def _read(self, state: dict[str, Any]) -> None:
        """What ``dcp.load`` does for one process; that warns where there is no default group."""
        from torch.distributed.checkpoint import DefaultLoadPlanner

        planner, reader = DefaultLoadPlanner(), self._reader
        planner.set_up_planner({self._key: state}, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        mine = reader.prepare_local_plan(planner.create_local_plan())
        [plan] = reader.prepare_global_plan(planner.create_global_plan([mine]))
        reader.read_data(planner.finish_plan(plan), planner).wait()


def _parts_of(share: Share, param: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What is elementwise in a share, flat, and the rest; of a whole parameter, too."""
    if share.elementwise:
        return share.elementwise, share.common
    whole = share.part == Slice(share.part.param, 0, param.numel())
    names = elementwise_names(share.common, param) if whole else set()
    flat = {name: memory_like(share.common[name], param) for name in names}
    return flat, {name: value for name, value in share.common.items() if name not in names}


def _packed(value: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _check_layout(meta: Any, params: Sequence[Tensor]) -> None:
    mine = [[list(param.shape), list(strides_of(param))] for param in params]
    if meta["layout"] == mine:
        return
    pairs = zip(meta["layout"], mine, strict=False)
    other = [n for n, (a, b) in enumerate(pairs) if a != b] or [min(len(mine), len(meta["layout"]))]
    raise OptimizerStateError(
        f"the checkpoint was made for other parameters, or for other memory formats: "
        f"{len(meta['layout'])} there, {len(mine)} here, parameter {other[0]} differs first.",
        "Nothing was loaded. Create the model and the optimizer as when it was saved.",
    )
