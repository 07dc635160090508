#!/bin/sh
# Makes benchmarks/.venv, the environment of the peers of data/loader.py: FFCV, PIL with torch's DataLoader, and
# imgnet-cluster itself (editable), all with the torch of pyproject.toml.
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
check='import cv2, numba, ffcv, torch, train; from ffcv.loader import Loader; from ffcv.fields import decoders'

here=$(cd "$(dirname "$0")" && pwd)
venv="$here/.venv"
wanted="$debian $builders $ffcv_imports $ffcv $(cksum <"$here/../pyproject.toml")"

fail() {
    echo "error: $1" >&2
    exit 1
}

if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ] && "$venv/bin/python" -c "$check" 2>/dev/null; then
    echo "already installed: $venv"
    exit 0
fi

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "Python 3.11 or newer is needed: PYTHON=python3.11 sh $0"
"$python" -c 'import ensurepip, venv' 2>/dev/null || debian="$debian python3-venv"
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$include/Python.h" ] || debian="$debian python3-dev"

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

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() {
    echo "pip install $*"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" || fail "pip install $* failed; its messages are above"
}
pip --editable "$here/.."
pip $builders $ffcv_imports
pip --no-deps --no-build-isolation "$ffcv"
"$venv/bin/python" -c "$check" || fail "the peers are installed but cannot be imported; remove $venv and run this script again"
echo "$wanted" >"$venv/.installed"
echo "ready: $venv, $ffcv, torch $("$venv/bin/python" -c "import torch; print(torch.__version__)")"
