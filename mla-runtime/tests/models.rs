//! The example configurations that are shipped are those of the presets.

use std::collections::BTreeMap;
use std::path::Path;

use mla_runtime::model::{ModelConfig, PRESETS};

#[test]
fn every_example_config_is_the_preset_of_its_name() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../mla-cli/models");
    let examples: BTreeMap<String, ModelConfig> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let json = std::fs::read_to_string(&path).unwrap();
            let config = ModelConfig::from_hf_config(&json)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (name, config)
        })
        .collect();
    let presets: BTreeMap<String, ModelConfig> = PRESETS
        .iter()
        .map(|preset| (preset.name.to_owned(), preset.config))
        .collect();
    assert_eq!(examples, presets);
}
