"""The smallest tier: a dictionary. Read it beside ``qkvault.tiers.base`` to learn what a tier has to do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qkvault.image import read_header, seal, sketch_of, verify_payload
from qkvault.tiers.base import Found, JobKind, JobResult, Piece, Tier, TierJob
from qkvault.types import Medium


class DictTier(Tier):
    """Keeps images in this process. Works within ``submit``, on the caller's thread; what it holds ends with it."""

    name, medium, is_healthy = "dict", Medium.DISK, True

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        self.capacity_bytes = capacity_bytes
        self.images: dict[bytes, bytes] = {}  # oldest use first
        self._results: list[JobResult] = []

    def stored_bytes(self, image_bytes: int) -> int:
        return image_bytes

    def submit(self, job: TierJob) -> None:
        for key in job.delete_first:
            self.images.pop(key, None)
        failed = {piece.key: reason for piece in job.pieces if (reason := self._do(job.kind, piece))}
        done = tuple(piece.key for piece in job.pieces if piece.key not in failed)
        self._results.append(JobResult(job.job_id, done, tuple(failed.items())))
        self.on_result()

    def _do(self, kind: JobKind, piece: Piece) -> str:
        image = self.images.pop(piece.key, b"")
        try:
            if kind is JobKind.STORE:
                seal(piece.image)
                image = bytes(piece.image)
            elif kind is JobKind.LOAD and image:
                piece.image[:] = image
                verify_payload(piece.image, read_header(piece.image))
        except ValueError:
            return "corrupt"
        if image and kind is not JobKind.DELETE:
            self.images[piece.key] = image
        return "" if image else "absent"

    def poll(self) -> list[JobResult]:
        results, self._results = self._results, []
        return results

    def scan(self) -> Iterator[Sequence[Found]]:
        for image in list(self.images.values()):
            head, size = read_header(memoryview(image)), len(image)
            sketch = sketch_of(head.tokens)
            yield [Found(head.key, head.parent, sketch, head.num_tokens, size, size, space=head.space)]

    def contains(self, key: bytes) -> bool | None:
        return key in self.images

    def drain(self, timeout_seconds: float) -> bool:
        return timeout_seconds >= 0

    def close(self) -> None:
        self.images.clear()
