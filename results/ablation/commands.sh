# The commands behind these rows, on two NVIDIA H200 with four or five processes each; the commit is in every row, the variant too.
# At e1bd1dd there were no kernels for training yet. The three with another hidden size came later, and were trained by the kernels.
kvbench run --policy full --model ref --cr 7/8 --gen-len 1024 --limit 200 --out results/ablation/full
while read -r name policy changes; do
  kvbench train --policy $policy --model ref --recipe ref-ablation $changes --out runs/ablation/$name
  kvbench run --policy $policy --checkpoint runs/ablation/$name --no-dense --model ref --cr 7/8 --gen-len 1024 --limit 200 --out results/ablation/$name
done <<'VARIANTS'
kvpop kvpop
immediate kvpop --policy-arg scoring=immediate
sparse_normaliser kvpop --set normaliser=sparse
target_power_1 kvpop --set target_power=1
boundary_slots_0 kvpop --set boundary_slots=0
target_power_1_boundary_slots_0 kvpop --set target_power=1 --set boundary_slots=0
decay_learned kvpop --policy-arg decay=learned
group_mean kvpop --set group=mean
decay_learned_group_mean kvpop --policy-arg decay=learned --set group=mean
decay_learned_group_mean_margin_0 kvpop --policy-arg decay=learned --set group=mean --set margin=0
decay_learned_group_mean_features_32 kvpop --policy-arg decay=learned --policy-arg features=32 --policy-arg values=16 --set group=mean
decay_learned_group_mean_hidden_88 kvpop --policy-arg hidden=88 --policy-arg decay=learned --set group=mean
margin_0 kvpop --set margin=0
no_count kvpop --set count=false
no_skip kvpop --policy-arg skip=false
frozen_lm kvpop --set freeze_lm=true
kvpop_mlp kvpop_mlp
kvpop_mlp_decay_learned_group_mean kvpop_mlp --policy-arg decay=learned --set group=mean
kvpop_mlp_decay_learned_group_mean_hidden_170 kvpop_mlp --policy-arg hidden=170 --policy-arg decay=learned --set group=mean
kvpop_linear kvpop_linear
dms dms
dms_scorer_lr_0.001 dms --set scorer_lr=1e-3
dms_detached dms --policy-arg detached=true
dms_temperature_0.5 dms --policy-arg temperature=0.5
dms_hidden_170 dms --policy-arg hidden=170
VARIANTS
kvbench table results/ablation/*/ --format md > results/ablation/table.md
kvbench table results/ablation/*/ --format csv > results/ablation/table.csv
