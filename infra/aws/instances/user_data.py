"""Cloud-init user data: what a machine does when it boots, before anybody can log in.

The power-off timer is armed first, so that a machine whose setup hangs, or that nobody logs in to, ends by itself. All
files of the project are in ~/.imgnet: the fast local disks are mounted there as one volume, the stack's file system
below it at `shared`. The file `ready` is written last, or `failed` with the reason as soon as it is known; the console
shows it too, and the machine powers itself off after 15 minutes. The boot host key makes the first login safe. It is
the only secret here, and is worthless once `imgnet-hostkey` has replaced it.

Sources: cloud-init "cc_ssh", "cc_bootcmd"; AWS, "Mounting EFS file systems"; nfs(5) for mount options with which a new
file is visible within a second. Not yet run on AWS itself.
"""

import json

from infra.aws.launch_request import Internet
from infra.aws.stack.stack import Stack

from .amis import Image

# The file holds the moment of the power-off in Unix seconds, and the seconds that were asked for. Without the second
# number, a clock that jumps back would move the power-off by as much.
LIMIT_FILE = "/var/lib/imgnet-limit"

LIMIT_SCRIPT = f"""#!/bin/sh
# imgnet-limit SECONDS: power off that many seconds from now, a whole number. The new timer is started before old ones
# are stopped. Two calls at once would stop each other's timer, so the second one waits.
set -e
exec 9</var/lib/
flock -w 10 9 || :
new=imgnet-limit-$$
systemd-run --quiet --unit="$new" --on-active="$1" systemctl poweroff
for timer in $(systemctl list-units --plain --no-legend 'imgnet-limit*.timer' | cut -d' ' -f1); do
    [ "$timer" = "$new.timer" ] || systemctl stop "$timer"
done
echo "$(($(date +%s) + $1)) $1" >{LIMIT_FILE}
"""

# bootcmd runs at every boot: the first one arms the whole limit, later ones what is left of it. It runs in a unit that
# comes before sysinit.target (Ubuntu's cloud-init.service). Timers wait for that target by default (systemd.timer,
# "Default Dependencies"), and systemd-run waits for its timer: without these options the boot would hang.
ARM_SCRIPT = f"""
now=$(date +%s)
if read -r end seconds 2>/dev/null <{LIMIT_FILE}; then
    left=$((end - now))
    [ "$left" -gt 0 ] || left=1
    [ "$left" -le "$seconds" ] || left=$seconds
else
    left=$1
    echo "$((now + left)) $left" >{LIMIT_FILE}
fi
exec systemd-run --no-block --timer-property=DefaultDependencies=no --unit=imgnet-limit --on-active="$left" \
    systemctl poweroff
"""

HOST_KEY_SCRIPT = """#!/bin/sh
# imgnet-hostkey: generate this machine's own host key and print it. The key in the user data is then worthless.
set -e
cd /etc/ssh
if [ ! -e imgnet_host_key ]; then
    rm -f imgnet_new*
    ssh-keygen -q -t ed25519 -N '' -C '' -f imgnet_new
    mv imgnet_new.pub imgnet_host_key.pub
    mv imgnet_new imgnet_host_key
fi
mkdir -p sshd_config.d
echo "HostKey /etc/ssh/imgnet_host_key" >sshd_config.d/00-imgnet.conf
sshd -t
rm -f ssh_host_*
find /var/lib/cloud -name '*user-data*' -delete -o -name 'cloud-config.txt' -delete
systemctl reload ssh || systemctl reload sshd
cut -d' ' -f1,2 imgnet_host_key.pub
"""

# AWS serves the newest version under this address and publishes no checksum, so none can be pinned here.
EFS_UTILS_URL = "https://amazon-efs-utils.aws.com/efs-utils-installer.sh"

# The user may log in while this runs, and must be able to write below ~/.imgnet and to read the reason of a failure.
# $(uptime) is in seconds and, unlike the date, does not jump while a machine boots. A public address may arrive late.
SETUP_SCRIPT = r"""
efs=$1 access=$2 user=$3 python=$4 fetch_seconds=$5 check_url=$6
home=$(getent passwd "$user" | cut -d: -f6)
folder=$home/.imgnet
mkdir -p "$folder"
chown "$user" "$home" "$folder"
fail() {
    read -r end _ </var/lib/imgnet-limit && [ $((end - $(date +%s))) -le 900 ] || imgnet-limit 900
    echo "imgnet: boot failed: $1"
    echo "$1" >"$folder/failed"
    chown "$user" "$folder" "$folder/failed"
    exit 1
}
uptime() { cut -d. -f1 /proc/uptime; }
fetch() {
    deadline=$(($(uptime) + fetch_seconds))
    until curl -sS --connect-timeout 5 --max-time 10 "$@"; do
        [ "$(uptime)" -lt "$deadline" ] || return 1
        sleep 2
    done
}
command -v curl >/dev/null || fail "there is no curl"
[ -z "$check_url" ] || fetch -o /dev/null "$check_url" || fail "no way to the internet: $check_url cannot be fetched"
options=tls,iam,noresvport,lookupcache=positive,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1
if mountpoint -q /opt/dlami/nvme; then
    mkdir -p /opt/dlami/nvme/imgnet
    mount --bind /opt/dlami/nvme/imgnet "$folder" || fail "the fast disk cannot be mounted"
else
    disks=$(lsblk -dpno NAME,MODEL | awk '/Instance Storage/ {print $1}')
    count=$(echo "$disks" | wc -w)
    if [ "$count" -gt 1 ]; then
        mdadm --create /dev/md0 --run --force --level=0 --raid-devices="$count" $disks ||
            fail "mdadm cannot join the fast disks"
        disks=/dev/md0
    fi
    if [ "$count" -gt 0 ]; then
        mkfs.ext4 -q -E nodiscard "$disks" && mount -o noatime "$disks" "$folder" || fail "the fast disk cannot be used"
    fi
fi
chown "$user" "$folder"
mkdir -p "$folder/shared"
[ ! -d /etc/apt/apt.conf.d ] || echo 'DPkg::Lock::Timeout "300";' >/etc/apt/apt.conf.d/99imgnet
if ! command -v mount.efs >/dev/null; then
    installer=$(mktemp)
    fetch -f -o "$installer" EFS_UTILS_URL || fail "EFS_UTILS_URL cannot be fetched"
    { sh "$installer" --install >/dev/null && command -v mount.efs >/dev/null; } ||
        fail "amazon-efs-utils cannot be installed; take an image that has it: --ami"
fi
tries=0
until mount -t efs -o "$options,accesspoint=$access" "$efs:/" "$folder/shared"; do
    tries=$((tries + 1))
    [ $tries -lt 12 ] || fail "the file system $efs cannot be mounted; see /var/log/amazon/efs/mount.log"
    sleep 5
done
for candidate in "$python" /opt/pytorch/bin/python /usr/bin/python3; do
    if [ -x "$candidate" ]; then  # no link: through one, Python would not find its virtual environment's packages
        printf '#!/bin/sh\nexec %s "$@"\n' "$candidate" >"$folder/python"
        chmod 755 "$folder/python"
        break
    fi
done
[ -e "$folder/python" ] || fail "there is no Python 3"
if ! command -v tmux >/dev/null; then
    apt-get -q update >/dev/null  # an image may have no list of packages
    apt-get -q -y install tmux >/dev/null || fail "tmux cannot be installed"
fi
chown "$user" "$folder/python"
echo ready >"$folder/.ready"
chown "$user" "$folder/.ready"
mv "$folder/.ready" "$folder/ready"
""".replace("EFS_UTILS_URL", EFS_UTILS_URL)


def build_user_data(
    stack: Stack, image: Image, cards: int, internet: Internet, boot_key: tuple[str, str], *, poweroff_seconds: int
) -> str:
    """Return the user data of a machine that powers off after `poweroff_seconds`.

    `boot_key` is the boot host key, its private and its public half. A machine that we give a way to the internet tries
    it before anything else, and fails when there is none for 50 seconds, or for 10 minutes with several network
    `cards`: its public address comes when all machines of its request run. The user's own way may let nothing out to
    the address that is tried, which a machine with the EFS client does not need.
    """
    fetch_seconds = "600" if internet is Internet.PUBLIC and cards > 1 else "50"
    check_url = EFS_UTILS_URL if internet in (Internet.PUBLIC, Internet.NAT) else ""
    private_key, public_key = boot_key
    setup_arguments = [stack.file_system, stack.access_point, image.ssh_user, image.python, fetch_seconds, check_url]
    scripts = {"imgnet-limit": LIMIT_SCRIPT, "imgnet-hostkey": HOST_KEY_SCRIPT}
    config = {
        "bootcmd": [["sh", "-c", ARM_SCRIPT, "sh", str(poweroff_seconds)]],
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": private_key, "ed25519_public": public_key},
        "write_files": [
            {"path": f"/usr/local/sbin/{name}", "permissions": "0755", "content": script}
            for name, script in scripts.items()
        ],
        "runcmd": [["sh", "-c", SETUP_SCRIPT, "sh", *setup_arguments]],
    }
    return "#cloud-config\n" + json.dumps(config)
