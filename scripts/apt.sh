# apt_install PACKAGE: install with apt as root, or with sudo if it needs no password; otherwise fail quietly.
apt_install() {
    command -v apt-get >/dev/null 2>&1 || return 1
    if [ "$(id -u)" = 0 ]; then as_root=""
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then as_root="sudo"
    else return 1
    fi
    echo "installing $1 with apt" >&2
    $as_root apt-get update -qq >&2 || true
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends "$1" >&2
}
