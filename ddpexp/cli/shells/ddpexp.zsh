# Completion for ddpexp. In ~/.zshrc, behind compinit:  eval "$(ddpexp completion zsh)"
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
