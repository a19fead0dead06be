#!/usr/bin/env bash
# Installs PyTorch into a virtual environment: the CUDA build where there is an NVIDIA driver, else
# the CPU build, so that a machine without a GPU never downloads gigabytes of CUDA libraries.
# Usage: tools/install_torch.sh path/to/venv/bin/python
set -euo pipefail

python="$1"
minimum="2.11"
cpu_version="2.13.0" # named exactly, since only an exact local version ("+cpu") selects the CPU build

if "$python" - "$minimum" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
have, want = (tuple(int(part) for part in v.split("+")[0].split(".")[:2]) for v in (version("torch"), sys.argv[1]))
sys.exit(have < want)
PY
then
  exit 0
fi

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
  echo "NVIDIA driver found: installing PyTorch with CUDA"
  exec "$python" -m pip install --quiet "torch>=$minimum"
fi

echo "No NVIDIA driver: installing the CPU build of PyTorch"
# Works where pip is configured with an index or folder that has CPU builds.
if "$python" -m pip install --quiet "torch==$cpu_version+cpu" 2>/dev/null; then
  exit 0
fi
# PyPI has no CPU builds for Linux; uv knows PyTorch's own index.
if "$python" -m pip install --quiet "uv>=0.7" &&
  "$python" -m uv pip install --quiet --python "$python" --torch-backend=cpu "torch==$cpu_version"; then
  exit 0
fi

cat >&2 <<EOF
Could not install the CPU build of PyTorch (torch $cpu_version+cpu).
Install it by hand as pytorch.org says for your machine, into this environment:
    $python -m pip install ...
and run make again. A PyTorch of version $minimum or later that is already there is kept.
EOF
exit 1
