#!/bin/sh
# Makes benchmarks/.venv, the environment of what is compared with: the checkers and libraries of tests/peers and
# tests/cluster/records; and the peers of data/loader.py: FFCV, PIL with torch's DataLoader, and imgnet-cluster itself
# (editable). All have the torch of constraints.txt.
#
#     sh benchmarks/peers.sh          # two minutes the first time, seconds when everything is installed
#
# FFCV has no wheel: it is compiled against Debian's OpenCV and libturbojpeg. Its requirements include torchvision, for
# which PyPI has wheels for CUDA only. FFCV 1.0.2 does not import torchvision, so the packages that it does import are
# installed by name, and FFCV without its dependencies.
set -eu

debian="g++ pkg-config libopencv-dev libturbojpeg0-dev"
builders="setuptools==84.2.1 wheel==0.48.0"
ffcv_imports="numba==0.68.1 opencv-python-headless==5.0.0.93 psutil==7.2.2 tqdm==4.70.1 assertpy==1.1 fastargs==1.2.0 terminaltables==3.1.10"
ffcv="ffcv==1.0.2"
# What tests compare with. torchvision comes without its dependencies: for CPUs, tests/peers do without its operators.
torchvision="torchvision==0.28.0"
tested="mlperf-logging==4.1.68 safetensors timm==1.0.31"
# What the training scripts of others import that tests/end_to_end/test_third_party_scripts.py runs.
script_libraries="accelerate==1.15.0 datasets==5.2.0 evaluate==0.4.6 lightning==2.6.6 mlflow-skinny==3.17.2 transformers==5.23.0 trl==1.16.0 wandb==0.31.0"
check='import cv2, numba, ffcv, torch, train; from ffcv.loader import Loader; from ffcv.fields import decoders'

here=$(cd "$(dirname "$0")" && pwd)
venv="$here/.venv"
wanted="$debian $builders $ffcv_imports $ffcv $tested $script_libraries $torchvision $(cat "$here/../pyproject.toml" "$here/../constraints.txt" | cksum)"

fail() {
    echo "error: $1" >&2
    exit 1
}

fetch_scripts() {
    "$venv/bin/python" "$here/../tests/support/third_party.py" "$venv/third_party"
}

if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c "$check" 2>/dev/null; then
    fetch_scripts
    echo "already installed: $venv"
    exit 0
fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed: PYTHON=python3.11 sh $0"
"$python" -c 'import ensurepip, venv' 2>/dev/null || debian="$debian python3-venv"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$include/Python.h" ] || debian="$debian python3-dev"

install_debian() {
    missing=
    for package in $debian; do
        dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        sudo=
        [ "$(id -u)" = 0 ] || sudo="sudo -n"
        command -v apt-get >/dev/null && $sudo true 2>/dev/null || fail "please install$missing (Debian: sudo apt-get install$missing), then run this script again"
        echo "Debian packages:$missing"
        $sudo apt-get update -qq || fail "apt-get update failed; is there a network?"
        DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null || fail "apt-get install$missing failed"
    fi
}

# What tests compare with needs neither a compiler nor Debian's packages, so it comes first.
"$python" -c 'import ensurepip, venv' 2>/dev/null || install_debian
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() {
    echo "pip install $*"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --constraint "$here/../constraints.txt" "$@" ||
        fail "pip install $* failed; its messages are above"
}
(cd "$here/.." && sh tools.sh torch benchmarks/.venv)
pip --editable "$here/.."
pip --no-deps "$torchvision"
pip $tested
pip $script_libraries
fetch_scripts

install_debian
pip $builders $ffcv_imports
pip --no-deps --no-build-isolation "$ffcv"
"$venv/bin/python" -c "$check" || fail "the peers are installed but cannot be imported; remove $venv and run this script again"
echo "$wanted" >"$venv/.installed"
echo "ready: $venv, $ffcv, torch $("$venv/bin/python" -c "import torch; print(torch.__version__)")"
