"""Names of the types that weights have. No torch: configurations use them."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
LoadDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
"""auto: bfloat16 on a GPU, float32 elsewhere (`models.loading.resolve_dtype`)."""
BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
