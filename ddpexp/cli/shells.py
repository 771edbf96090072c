"""What a shell evaluates to complete ddpexp's words: functions that ask `ddpexp completion SHELL` with the line so far.

The line travels in the environment, which no other user sees. The function for Python leaves every other module to what
completed it before.
"""

from __future__ import annotations

LINE = "_DDPEXP_LINE"  # what is typed so far, up to the cursor
BREAKS = "_DDPEXP_BREAKS"  # of bash: the characters at which readline takes a word apart

_BASH = r"""# Completion for ddpexp. In ~/.bashrc:  eval "$(ddpexp completion bash)"
_ddpexp_ask() {
  compopt -o nospace +o default +o bashdefault +o filenames 2>/dev/null
  mapfile -t COMPREPLY < <(
    _DDPEXP_LINE="${COMP_LINE:0:COMP_POINT}" _DDPEXP_BREAKS="$COMP_WORDBREAKS" "$@" completion bash 2>/dev/null </dev/null
  )
}
_ddpexp() {
  _ddpexp_ask "${1/#\~\//$HOME/}"
}
declare -gA _ddpexp_before
_ddpexp_python() {
  if [[ ${COMP_LINE:0:COMP_POINT} =~ [[:space:]]-m[[:space:]]+ddpexp[[:space:]] ]]; then
    _ddpexp_ask "${1/#\~\//$HOME/}" -m ddpexp
  elif [[ -n ${_ddpexp_before[${1##*/}]-} ]]; then
    "${_ddpexp_before[${1##*/}]}" "$@"
  fi
}
_ddpexp_register() {
  complete -F _ddpexp ddpexp
  local name spec
  for name; do
    if ! complete -p "$name" >/dev/null 2>&1 && declare -F _completion_loader >/dev/null; then
      _completion_loader "$name" >/dev/null 2>&1
    fi
    spec=$(complete -p "$name" 2>/dev/null)
    if [[ $spec == *' -F _ddpexp_python '* ]]; then
      continue
    elif [[ $spec =~ \ -F\ ([^[:space:]]+)\  ]]; then
      _ddpexp_before[$name]=${BASH_REMATCH[1]}
      eval "${spec/ -F "${BASH_REMATCH[1]}" / -F _ddpexp_python }"
    elif [[ -z $spec ]]; then
      complete -o bashdefault -o default -F _ddpexp_python "$name"
    fi
  done
}
_ddpexp_register @PYTHONS@
unset -f _ddpexp_register
"""

_ZSH = r"""# Completion for ddpexp. In ~/.zshrc, behind compinit:  eval "$(ddpexp completion zsh)"
_ddpexp_ask() {
  local line text
  local -a open shown_open closed shown_closed written=(-Q)
  [[ -n $compstate[quote] ]] && written=()
  line="${(j: :)words[1,CURRENT-1]} $QIPREFIX$PREFIX"
  for line in "${(@f)$(_DDPEXP_LINE="$line" "$@" completion zsh 2>/dev/null </dev/null)}"; do
    text="${line%%$'\t'*}"
    if [[ $text == *' ' ]]; then
      closed+=("${text% }") shown_closed+=("${text% }${line#*$'\t'}")
    elif [[ -n $text ]]; then
      open+=("$text") shown_open+=("$text${line#*$'\t'}")
    fi
  done
  (( $#open + $#closed )) || return 1
  (( $#open )) && compadd $written -S '' -V ddpexp -d shown_open -- "${open[@]}"
  (( $#closed )) && compadd $written -V ddpexp -d shown_closed -- "${closed[@]}"
  return 0
}
_ddpexp() {
  _ddpexp_ask "${words[1]/#\~\//$HOME/}"
}
_ddpexp_python() {
  if [[ "${(j: :)words[1,CURRENT-1]} " == *' -m ddpexp '* ]]; then
    _ddpexp_ask "${words[1]/#\~\//$HOME/}" -m ddpexp
  elif (( $+functions[_python] )); then
    _python "$@"
  else
    _default "$@"
  fi
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _ddpexp ddpexp
compdef _ddpexp_python @PYTHONS@
"""

_FISH = r"""# Completion for ddpexp. In ~/.config/fish/config.fish:  ddpexp completion fish | source
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
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def script(shell: str, pythons: str) -> str:
    """Return what the shell evaluates.

    `pythons` are the names under which Python is typed, with blanks between them.
    """
    return SCRIPTS[shell].replace("@PYTHONS@", pythons)
