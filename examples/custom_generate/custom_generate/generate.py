"""`generate()` with spec_compile: `model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True)`."""

from spec_compile.custom_generate import generate

__all__ = ["generate"]
