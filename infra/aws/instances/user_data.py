"""What a machine does when it boots, before anybody can log in: cloud-init's user data.

The power-off is armed first, so that a machine whose set-up hangs, or whom nobody comes for, ends by itself. Everything
of ours is in ~/.imgnet: the fast local disks as one volume, the file system of the stack below it as `shared`, and
`ready`, written last (or `failed` with the reason). The bootstrap host key makes the first login safe; it is the only
secret here, and worth nothing once `imgnet-hostkey` has replaced it.

Sources: cloud-init "cc_ssh", "cc_bootcmd"; AWS, "Mounting EFS file systems"; nfs(5) for the options of facts that are
seen within a second. Never run on AWS itself yet.
"""

import json

LIMIT_SCRIPT = """#!/bin/sh
# imgnet-limit SECONDS: cut the power that many seconds from now. The new timer runs before the old ones end.
set -e
new=imgnet-limit-$$
systemd-run --quiet --unit="$new" --on-active="$1" systemctl poweroff
for one in $(systemctl list-units --plain --no-legend 'imgnet-limit*.timer' | cut -d' ' -f1); do
    [ "$one" = "$new.timer" ] || systemctl stop "$one"
done
"""

# bootcmd runs in a unit before sysinit.target, for which timers wait, and systemd-run for the timer: the boot would
# hang (systemd.timer, "Default Dependencies"; cloud-init.service of Ubuntu has Before=sysinit.target).
ARM_TIMER_COMMAND = ("systemd-run", "--no-block", "--timer-property=DefaultDependencies=no")

HOST_KEY_SCRIPT = """#!/bin/sh
# imgnet-hostkey: give this machine a host key of its own, and print it. The key of the user data opens nothing more.
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

SETUP_SCRIPT = r"""
efs=$1 access=$2 region=$3 user=$4 python=$5
home=$(getent passwd "$user" | cut -d: -f6)
folder=$home/.imgnet
mkdir -p "$folder"
fail() {
    echo "$1" >"$folder/failed"
    chown -R "$user" "$folder/failed"
    exit 1
}
options=tls,iam,noresvport,lookupcache=positive,acregmin=1,acregmax=1,acdirmin=1,acdirmax=1
if mountpoint -q /opt/dlami/nvme; then
    mkdir -p /opt/dlami/nvme/imgnet
    mount --bind /opt/dlami/nvme/imgnet "$folder" || fail "the fast disk cannot be mounted"
else
    disks=$(lsblk -dpno NAME,MODEL | awk '/Instance Storage/ {print $1}')
    count=$(echo "$disks" | wc -w)
    if [ "$count" -gt 1 ]; then
        mdadm --create /dev/md0 --run --force --level=0 --raid-devices="$count" $disks || fail "the fast disks: mdadm"
        disks=/dev/md0
    fi
    if [ "$count" -gt 0 ]; then
        mkfs.ext4 -q -E nodiscard "$disks" && mount -o noatime "$disks" "$folder" || fail "the fast disk cannot be used"
    fi
fi
mkdir -p "$folder/shared"
if ! command -v mount.efs >/dev/null; then
    curl -fsS https://amazon-efs-utils.aws.com/efs-utils-installer.sh | sh -s -- --install >/dev/null ||
        fail "amazon-efs-utils cannot be installed; take an image that has it: --ami"
fi
tries=0
until mount -t efs -o "$options,accesspoint=$access" "$efs:/" "$folder/shared"; do
    tries=$((tries + 1))
    [ $tries -lt 12 ] || fail "the file system $efs cannot be mounted; see /var/log/amazon/efs/mount.log"
    sleep 5
done
for one in "$python" /opt/pytorch/bin/python /usr/bin/python3; do
    if [ -x "$one" ]; then  # a link to the Python of a virtual environment would find none of its packages
        printf '#!/bin/sh\nexec %s "$@"\n' "$one" >"$folder/python"
        chmod 755 "$folder/python"
        break
    fi
done
[ -e "$folder/python" ] || fail "there is no Python 3"
if ! command -v tmux >/dev/null; then
    apt-get -q -y install tmux >/dev/null || fail "tmux cannot be installed"
fi
chown "$user" "$home" "$folder" "$folder/python"
touch "$folder/ready"
chown "$user" "$folder/ready"
"""


def build_user_data(
    *,
    poweroff_seconds: int,
    private_key: str,
    public_key: str,
    file_system: str,
    access_point: str,
    region: str,
    ssh_user: str,
    python: str,
) -> str:
    """Return the user data: power off in so many `seconds`; `private` and `public` are the bootstrap host key."""
    files = {"imgnet-limit": LIMIT_SCRIPT, "imgnet-hostkey": HOST_KEY_SCRIPT}
    config = {
        "bootcmd": [
            [*ARM_TIMER_COMMAND, "--unit=imgnet-limit", f"--on-active={poweroff_seconds}", "systemctl", "poweroff"],
        ],
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": private_key, "ed25519_public": public_key},
        "write_files": [
            {"path": f"/usr/local/sbin/{name}", "permissions": "0755", "content": text} for name, text in files.items()
        ],
        "runcmd": [["sh", "-c", SETUP_SCRIPT, "sh", file_system, access_point, region, ssh_user, python]],
    }
    return "#cloud-config\n" + json.dumps(config)
