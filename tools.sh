#!/bin/sh
# Make .venv, and bring tmux and OpenSSH: through apt where we may (root, or sudo that asks nothing), else say what to install.
# `tools.sh browser` brings chromium for the tests of reports, where that can be; they are skipped without one.
set -eu

if [ "${1:-}" = browser ]; then
    for name in chromium chromium-browser google-chrome google-chrome-stable; do
        command -v $name >/dev/null && exit 0
    done
    sudo=
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    if command -v apt-get >/dev/null && $sudo true 2>/dev/null; then
        echo "installing chromium"
        $sudo apt-get update -qq || true
        DEBIAN_FRONTEND=noninteractive timeout 600 $sudo apt-get install -y -qq --no-install-recommends chromium \
            >/dev/null 2>&1 && exit 0
    fi
    echo "no browser here: the tests that open reports in one are skipped (Debian: sudo apt-get install chromium)" >&2
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
    sudo=
    [ "$(id -u)" = 0 ] || sudo="sudo -n"
    if command -v apt-get >/dev/null && $sudo true 2>/dev/null; then
        echo "installing$missing"
        $sudo apt-get update -qq
        # Services are for the machine's owner to start; ours run as they are needed.
        DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
    else
        echo "error: please install$missing (Debian, Ubuntu: sudo apt-get install$missing), then call make again" >&2
        exit 1
    fi
fi

[ -x .venv/bin/python ] || "$python" -m venv .venv
