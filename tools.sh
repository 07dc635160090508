#!/bin/sh
# tools.sh          create .venv; install tmux and OpenSSH through apt (as root, or with sudo that needs no password),
#                   or say what to install
# tools.sh torch [VENV]
#                   install PyTorch into .venv or VENV: the CPU wheel where there is no NVIDIA driver, because the
#                   default wheel for Linux brings gigabytes of CUDA libraries
# tools.sh browser  install chromium for the tests of the report; these tests are skipped without a browser
# tools.sh slurm    install Slurm for its rehearsals; they are skipped without it
set -eu

if [ "${1:-}" = torch ]; then
    venv=${2:-.venv}
    pin=$(grep '^torch==' constraints.txt)
    "$venv/bin/pip" show --quiet torch 2>/dev/null && exit 0
    # On macOS and Windows the default wheel is a CPU wheel.
    [ "$(uname -s)" = Linux ] && [ ! -e /proc/driver/nvidia/version ] || exit 0
    "$venv/bin/pip" install --disable-pip-version-check --no-compile --no-deps --retries 0 --timeout 15 \
        --index-url https://download.pytorch.org/whl/cpu "$pin+cpu" 2>/dev/null && exit 0
    echo "no CPU wheel of PyTorch could be fetched; pip takes the default wheel" >&2
    exit 0
fi

# apt_install PACKAGE...: install packages through apt. Returns 1 where that is not allowed or fails.
apt_install() {
    sudo=
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    command -v apt-get >/dev/null && $sudo true 2>/dev/null || return 1
    echo "installing $*"
    $sudo apt-get update -qq || true
    # Services are for the machine's owner to start; ours run as they are needed.
    DEBIAN_FRONTEND=noninteractive timeout 600 $sudo apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

if [ "${1:-}" = browser ]; then
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v $name >/dev/null && exit 0
    done
    apt_install chromium 2>/dev/null || echo "no browser here: the tests that open reports in one are skipped \
(Debian: sudo apt-get install chromium)" >&2
    exit 0
fi

if [ "${1:-}" = slurm ]; then
    PATH="$PATH:/usr/sbin:/sbin"
    command -v slurmctld >/dev/null && command -v munged >/dev/null && exit 0
    apt_install slurmctld slurmd slurm-client munge 2>/dev/null || echo "no Slurm here: its tests are skipped \
(Debian: sudo apt-get install slurmctld slurmd slurm-client munge)" >&2
    exit 0
fi

missing=
for pair in tmux:tmux ssh:openssh-client sshd:openssh-server; do
    PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || missing="$missing ${pair##*:}"
done

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version 2>&1) is too old; Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2
    exit 1
}
"$python" -c 'import venv, ensurepip' 2>/dev/null || missing="$missing python3-venv"

if [ -n "$missing" ]; then
    # shellcheck disable=SC2086  # several words
    apt_install $missing || {
        echo "error: please install$missing (Debian, Ubuntu: sudo apt-get install$missing), then call make again" >&2
        exit 1
    }
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
