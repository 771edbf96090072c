# Completion for ddpexp. In ~/.config/fish/config.fish:  ddpexp completion fish | source
function __ddpexp_ask
    set -lx _DDPEXP_LINE (commandline -cp | string collect)
    set -l typed (commandline -opc)
    set -l program (string replace -r '^~/' "$HOME/" -- $typed[1])
    if __ddpexp_is_module
        $program -m ddpexp completion fish 2>/dev/null </dev/null
    else
        $program completion fish 2>/dev/null </dev/null
    end
end
function __ddpexp_is_module
    string match -qr -- '\s-m\s+ddpexp\s' (commandline -cp | string collect)
end
complete -c ddpexp -e
complete -c ddpexp -f -k -a '(__ddpexp_ask)'
for name in @PYTHONS@
    complete -c $name -n __ddpexp_is_module -f -k -a '(__ddpexp_ask)'
end
