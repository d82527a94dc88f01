"""The recurrences: definition, operators and backends.

In a source checkout, the files are in kernels/ beside vil/, and a wheel has them here. That folder and those in it have
no ``__init__.py``, so that nobody takes them for Hugging Face's package ``kernels`` or for ``triton``. The wheel has
those of this folder.
"""

from pathlib import Path

_beside = Path(__file__).resolve().parents[2] / "kernels"
if not Path(__file__).with_name("ops.py").is_file() and (_beside / "ops.py").is_file():
    __path__ = [str(_beside)]
