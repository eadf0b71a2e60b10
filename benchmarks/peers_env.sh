#!/bin/sh
# Make .venv-peers: llm-compressor, and the AutoRound that it depends on, in their own environment,
# since they want older transformers and compressed-tensors than this project. Where it is there
# already, nothing is done.
#
#     sh benchmarks/peers_env.sh
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=.venv-peers
version=0.14.0
[ -e $venv/.installed-$version ] && exit 0

[ -e $venv/bin/python ] || "$python" -m venv $venv
pip="$venv/bin/python -m pip --disable-pip-version-check --quiet"
$pip install --upgrade pip
$pip install torch==2.13.0 llmcompressor==$version
$venv/bin/python -c 'import llmcompressor; print("llm-compressor", llmcompressor.__version__)'
touch $venv/.installed-$version
