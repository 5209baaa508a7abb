"""What cuDNN's convolutions take beside their results, as far as it was recorded.

cuDNN 9.15 computes in channels-last: it copies image, weight and result that lie otherwise, with the channels padded.
Fitted to recordings on an H200: patch embeddings of 16 x 16 pixels (batches of 16 and 48, bfloat16 and float32) and
of 4 x 4, and Whisper's two convolutions; exact on those but for one weight gradient of Whisper. Grouped convolutions
and images that lie channels-last choose other algorithms; no workspace is assumed for them.
"""

from collections.abc import Sequence

PADDED_CHANNELS = {2: 8, 4: 4}
"""Bytes of an element -> channels are padded to a multiple of this (16 bytes)."""
LARGE_KERNEL = 8
"""From this size on images of few channels are transposed too: 16 is, 4 is not; nothing between was recorded."""
FORWARD_HEADER_BYTES = 16
IMAGE_GRADIENT_HEADER_BYTES = 131
WEIGHT_GRADIENT_HEADER_BYTES = 144
PARTIAL_SUMS = {True: 3, False: 249}
"""Whether a kernel is large -> partial sums in float32 that a weight gradient of few channels is made of, in half
precision. A small weight gives few tiles, so its sum is cut into many parts; one shape of each kind was recorded."""


def transposes(groups: int, *, is_contiguous: bool) -> bool:
    """Whether cuDNN works on copies in channels-last."""
    return groups == 1 and is_contiguous


def forward_bytes(image_elements: int, out_elements: int, weight: Sequence[int], element_bytes: int) -> int:
    """The forward's workspace: image, weight and result in the other layout; float32 is not padded.

    A small kernel on few channels reads the image as it lies.
    """
    if weight[1] < min(PADDED_CHANNELS.values()) and weight[-1] < LARGE_KERNEL:
        return weight[0] * element_bytes
    ratio = _padding(weight[1], element_bytes) if element_bytes == 2 else 1.0
    elements = image_elements * ratio + out_elements + _product(weight) * ratio
    return int(elements * element_bytes) + FORWARD_HEADER_BYTES


def image_gradient_bytes(image_elements: int, out_elements: int, weight: Sequence[int], element_bytes: int) -> int:
    """The image gradient's workspace: as the forward's, with another header."""
    whole = forward_bytes(image_elements, out_elements, weight, element_bytes)
    return whole + IMAGE_GRADIENT_HEADER_BYTES - FORWARD_HEADER_BYTES


def weight_gradient_bytes(image_elements: int, out_elements: int, weight: Sequence[int], element_bytes: int) -> int:
    """The weight gradient's workspace."""
    ratio = _padding(weight[1], element_bytes)
    if ratio == 1.0:
        return forward_bytes(image_elements, out_elements, weight, element_bytes)
    parts = PARTIAL_SUMS[weight[-1] >= LARGE_KERNEL] if element_bytes == 2 else 0
    for_weights = _product(weight) * ratio * (element_bytes + 4 * parts)
    copies = (image_elements * ratio + out_elements) * element_bytes
    return int(copies + for_weights) + WEIGHT_GRADIENT_HEADER_BYTES


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _padding(channels: int, element_bytes: int) -> float:
    multiple = PADDED_CHANNELS.get(element_bytes, 1)
    return -(-channels // multiple) * multiple / channels
