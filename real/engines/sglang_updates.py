"""How a complete update goes from the landing into the server: by SGLang's own ways, each answering to a transport.

* shared memory: all parameters in one buffer, posted to `/update_weights_from_tensor` as a flattened bucket;
* broadcast: over a process group of two, this process and the server's scheduler, which takes them by
  `/update_weights_from_distributed`. The scheduler isn't in the trainer's own group: buckets cut tensors in two, and
  SGLang loads whole ones; and the digest that the trainer offered is of bytes that only who has them can check;
* checkpoint: the server reads the trainer's own file by `/update_weights_from_disk`. What the landing has read of it is
  for the comparison alone.

Whatever came on several ways goes by the first. At the end SGLang's checksums of the server's parameters are compared
with the landing's: a checkpoint of another architecture "succeeds", too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from ..commands import Json
from .sglang_landing import SglangLanding

Post = Callable[[str, Json], Awaitable[Any]]
"""Tells the server something; raises if it refuses."""


class Updates:
    """The ways into one server. `post` reaches it; `device`: where its parameters are."""

    def __init__(self, post: Post, landing: SglangLanding, device: str) -> None:
        self._post = post
        self._landing = landing
        self._pair = Pair(post, device)

    async def install(self, version: int) -> str:
        """Bring the landing's weights into the paused server, and see that they are there; which way they went."""
        said: Json = {
            "weight_version": str(version),
            # Refused while requests hold KV, with the weights changed all the same. Without a prefix cache there is no
            # other KV; theirs is theirs.
            "flush_cache": False,
        }
        came, files = self._landing.transports, self._landing.files
        if came == {"disk"} and len(files) == 1:
            way = "update_weights_from_disk"
            await self._from_disk(next(iter(files)), said)
        else:
            way = "update_weights_from_distributed" if came == {"broadcast"} else "update_weights_from_tensor"
            await self._post("/begin_weight_update", {})
            try:
                if came == {"broadcast"}:
                    await self._pair.send(self._landing, said)
                else:
                    flat = {"serialized_named_tensors": [self._landing.payload()], "load_format": "flattened_bucket"}
                    await self._post("/update_weights_from_tensor", {**flat, **said})
            finally:
                await self._post("/end_weight_update", {})
        await self.compare()
        return way

    async def _from_disk(self, file: Path, said: Json) -> None:
        # SGLang reads folders: this one has the trainer's file under a name that SGLang looks for.
        with TemporaryDirectory(prefix="rlsched-sglang-") as folder:
            self._landing.model.config.save_pretrained(folder)
            Path(folder, "model.safetensors").symlink_to(file.absolute())
            await self._post("/update_weights_from_disk", {"model_path": folder, **said})

    async def compare(self) -> None:
        """Raise unless the server's parameters are the landing's, bit for bit."""
        told = await self._post("/weights_checker", {"action": "checksum"})
        found, expected = told["ranks"][0]["checksums"], self._landing.expected()
        if found != expected:
            names = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
            raise RuntimeError(f"the server's weights are not what it was given: {', '.join(names)}")


class Pair:
    """A process group of this process, which sends, and the server's scheduler. It is formed by the first update and
    anew when one has failed: gloo on a CPU, NCCL on a GPU, where it has never been run."""

    TIMEOUT = timedelta(seconds=60)

    def __init__(self, post: Post, device: str) -> None:
        self._post = post
        self._device = device
        self._kind = "gloo" if device == "cpu" else "nccl"
        self._store: Any = None
        self._group: Any = None
        self._formed = 0

    async def send(self, landing: SglangLanding, said: Json) -> None:
        """Bring all parameters over, in one broadcast."""
        if self._group is None:
            await self._form()
        group, self._group = self._group, None  # of no more use, should this fail
        named, flat = landing.flat()
        layout = {
            "names": list(named),
            "dtypes": [str(p.dtype).removeprefix("torch.") for p in named.values()],
            "shapes": [list(p.shape) for p in named.values()],
        }
        taken = {"group_name": self._name, "load_format": "flattened_bucket", **layout, **said}
        buffer = flat.to(self._device)
        await asyncio.gather(
            asyncio.to_thread(lambda: group.broadcast([buffer], dist.BroadcastOptions()).wait()),  # from rank 0
            self._post("/update_weights_from_distributed", taken),
        )
        self._group = group

    @property
    def _name(self) -> str:
        return f"rlsched-{self._formed}"

    async def _form(self) -> None:
        self._formed += 1
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {
            "master_address": "127.0.0.1",
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": self._name,
            "backend": self._kind,
        }
        self._group, _ = await asyncio.gather(
            asyncio.to_thread(self._join), self._post("/init_weights_update_group", meeting)
        )

    def _join(self) -> Any:
        """Become rank 0. SGLang and torch look under these prefixes for the other member."""
        store = self._store
        for prefix in (self._name, f"{self._name}/", f"{torch.device(self._device).type}/"):
            store = dist.PrefixStore(prefix, store)
        if self._kind == "gloo":
            return dist.ProcessGroupGloo(store, 0, 2, self.TIMEOUT)
        return dist.ProcessGroupNCCL(store, 0, 2)
