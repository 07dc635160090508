#!/bin/sh
# build_image.sh FOLDER: make FOLDER/{disk.img,vmlinuz,initrd,cert.pem,key.pem}, a Debian set up as images of a cloud are,
# and FOLDER/qemu, the QEMU of the same Debian: in that of Debian 12 (7.2) this kernel panics now and then.
# Needs root, mmdebstrap, e2fsprogs and openssl; the packages come from this computer's Debian mirror. Takes two minutes.
set -eu
folder=$1
suite=trixie
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
packages=systemd-sysv,udev,dbus,linux-image-cloud-amd64,cloud-init,openssh-server,sudo,python3,tmux,curl,lvm2,e2fsprogs,\
mdadm,iproute2,kmod,ca-certificates,initramfs-tools,lz4
mkdir -p "$folder"
work=$(mktemp -d -p "$folder")
trap 'rm -rf "$work"' EXIT
root=$work/root
mmdebstrap --quiet --variant=apt --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"; echo COMPRESS=lz4 >"$1/etc/initramfs-tools/conf.d/fast"' \
    "$suite" "$root" "$mirror"

# A network by DHCP; no machine ID and no host keys of its own; settings from a disk labelled CIDATA (cloud-init NoCloud).
units=$root/etc/systemd/system
cat >"$root/etc/systemd/network/80-dhcp.network" <<'NETWORK'
[Match]
Name=en* eth*

[Network]
DHCP=ipv4
NETWORK
ln -sf /lib/systemd/system/systemd-networkd.service "$units/multi-user.target.wants/systemd-networkd.service"
echo 'network: {config: disabled}' >"$root/etc/cloud/cloud.cfg.d/90-network.cfg"
echo 'datasource_list: [NoCloud]' >"$root/etc/cloud/cloud.cfg.d/91-source.cfg"
echo '/dev/vda / ext4 defaults 0 0' >"$root/etc/fstab"
: >"$root/etc/machine-id"
rm -f "$root"/etc/ssh/ssh_host_*
for unit in apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer; do ln -sf /dev/null "$units/$unit"; done

# What AWS's deep-learning images do with the fast disks: one volume, mounted before cloud-init runs `runcmd`.
cat >"$units/dlami-nvme.service" <<'UNIT'
[Unit]
Before=cloud-final.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/sbin/join-disks

[Install]
WantedBy=multi-user.target
UNIT
cat >"$root/usr/local/sbin/join-disks" <<'JOIN'
#!/bin/sh
set -e
mkdir -p /opt/dlami/nvme
if [ ! -e /dev/vg.01/lv_ephemeral ]; then
    vgcreate vg.01 /dev/nvme0n1 /dev/nvme1n1
    lvcreate -y -l 100%FREE -i 2 -n lv_ephemeral vg.01
    mkfs.ext4 -q /dev/vg.01/lv_ephemeral
fi
mount -o noatime /dev/vg.01/lv_ephemeral /opt/dlami/nvme
chmod 1777 /opt/dlami/nvme
JOIN
chmod 755 "$root/usr/local/sbin/join-disks"
ln -sf /etc/systemd/system/dlami-nvme.service "$units/multi-user.target.wants/dlami-nvme.service"

# The server of amazon-efs-utils is internet.py on this computer, at the address that QEMU forwards.
echo '10.0.2.100 amazon-efs-utils.aws.com' >>"$root/etc/hosts"
openssl req -x509 -newkey rsa:2048 -nodes -days 3650 -subj /CN=amazon-efs-utils.aws.com \
    -addext subjectAltName=DNS:amazon-efs-utils.aws.com -keyout "$work/key.pem" -out "$work/cert.pem" 2>/dev/null
cat "$work/cert.pem" >>"$root/etc/ssl/certs/ca-certificates.crt"

rm -rf "$folder/qemu"
mmdebstrap --quiet --variant=extract --include=qemu-system-x86 "$suite" "$folder/qemu" "$mirror"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
cp "$root"/boot/vmlinuz-* "$work/vmlinuz"
cp "$root"/boot/initrd.img-* "$work/initrd"
mkfs.ext4 -q -d "$root" "$work/disk.img" 3G
mv "$work/vmlinuz" "$work/initrd" "$work/cert.pem" "$work/key.pem" "$work/disk.img" "$folder"
