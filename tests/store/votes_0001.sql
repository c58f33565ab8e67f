-- votes.db as the first release made it.
CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE campaigns (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR(200) NOT NULL,
    guidelines TEXT NOT NULL,
    kind VARCHAR(16) NOT NULL,
    overlap INTEGER NOT NULL,
    lease_s DOUBLE NOT NULL,
    undo_s DOUBLE NOT NULL,
    max_votes_per_rater INTEGER NOT NULL,
    gold_share DOUBLE NOT NULL,
    answer_style VARCHAR(16) NOT NULL,
    created_at DOUBLE NOT NULL,
    closed_at DOUBLE,
    CONSTRAINT uq_campaigns_name UNIQUE (name),
    CONSTRAINT ck_campaigns_overlap CHECK (overlap >= 1),
    CONSTRAINT ck_campaigns_answer_style CHECK (answer_style IN ('raw', 'markdown'))
);
CREATE TABLE raters (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    name VARCHAR(200) NOT NULL,
    role VARCHAR(16) NOT NULL,
    token_sha256 VARCHAR(64),
    invited_by INTEGER,
    created_at DOUBLE NOT NULL,
    expires_at DOUBLE,
    disabled_at DOUBLE,
    CONSTRAINT uq_raters_name UNIQUE (name),
    CONSTRAINT uq_raters_token_sha256 UNIQUE (token_sha256),
    CONSTRAINT fk_raters_invited_by FOREIGN KEY(invited_by) REFERENCES raters (id),
    CONSTRAINT ck_raters_role CHECK (role IN ('rater', 'admin'))
);
CREATE TABLE commands (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    kind VARCHAR(32) NOT NULL,
    argument TEXT NOT NULL,
    rater_id INTEGER NOT NULL,
    created_at DOUBLE NOT NULL,
    CONSTRAINT fk_commands_rater_id FOREIGN KEY(rater_id) REFERENCES raters (id)
);
CREATE TABLE prompts (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    campaign_id INTEGER NOT NULL,
    content_json TEXT NOT NULL,
    sha256 VARCHAR(64) NOT NULL,
    CONSTRAINT uq_prompts_campaign_id_sha256 UNIQUE (campaign_id, sha256),
    CONSTRAINT fk_prompts_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id)
);
CREATE TABLE candidates (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    prompt_id INTEGER NOT NULL,
    text TEXT NOT NULL,
    token_ids_json TEXT,
    logps_json TEXT,
    weight_version INTEGER,
    source_id VARCHAR(200) NOT NULL,
    CONSTRAINT fk_candidates_prompt_id FOREIGN KEY(prompt_id) REFERENCES prompts (id)
);
CREATE TABLE items (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    campaign_id INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    is_gold BOOLEAN NOT NULL,
    gold_candidate_id INTEGER,
    heldout BOOLEAN NOT NULL,
    offer_id INTEGER,
    is_open BOOLEAN NOT NULL,
    retired_at DOUBLE,
    CONSTRAINT uq_items_campaign_id_offer_id UNIQUE (campaign_id, offer_id),
    CONSTRAINT fk_items_campaign_id FOREIGN KEY(campaign_id) REFERENCES campaigns (id),
    CONSTRAINT fk_items_prompt_id FOREIGN KEY(prompt_id) REFERENCES prompts (id),
    CONSTRAINT fk_items_gold_candidate_id FOREIGN KEY(gold_candidate_id) REFERENCES candidates (id),
    CONSTRAINT ck_items_kind CHECK (kind IN ('pair', 'ranking'))
);
CREATE INDEX ix_items_queue ON items (campaign_id, is_open, is_gold, offer_id, id);
CREATE INDEX ix_items_prompt_id ON items (prompt_id);
CREATE TABLE item_candidates (
    item_id INTEGER NOT NULL,
    position INTEGER NOT NULL,
    candidate_id INTEGER NOT NULL,
    CONSTRAINT pk_item_candidates PRIMARY KEY (item_id, position),
    CONSTRAINT fk_item_candidates_item_id FOREIGN KEY(item_id) REFERENCES items (id),
    CONSTRAINT fk_item_candidates_candidate_id FOREIGN KEY(candidate_id) REFERENCES candidates (id)
);
CREATE TABLE presentations (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    item_id INTEGER NOT NULL,
    rater_id INTEGER NOT NULL,
    token VARCHAR(43) NOT NULL,
    order_json TEXT NOT NULL,
    seed INTEGER NOT NULL,
    shown_at DOUBLE NOT NULL,
    lease_until DOUBLE NOT NULL,
    state VARCHAR(16) NOT NULL,
    CONSTRAINT uq_presentations_token UNIQUE (token),
    CONSTRAINT uq_presentations_item_id_rater_id UNIQUE (item_id, rater_id),
    CONSTRAINT fk_presentations_item_id FOREIGN KEY(item_id) REFERENCES items (id),
    CONSTRAINT fk_presentations_rater_id FOREIGN KEY(rater_id) REFERENCES raters (id),
    CONSTRAINT ck_presentations_state CHECK (state IN ('open', 'done', 'skipped', 'expired'))
);
CREATE INDEX ix_presentations_rater_state ON presentations (rater_id, state);
CREATE TABLE votes (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    presentation_id INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    verdict VARCHAR(16) NOT NULL,
    reason TEXT NOT NULL,
    chosen_candidate_id INTEGER,
    rejected_candidate_id INTEGER,
    dwell_ms INTEGER,
    created_at DOUBLE NOT NULL,
    request_key VARCHAR(200),
    CONSTRAINT uq_votes_presentation_id_revision UNIQUE (presentation_id, revision),
    CONSTRAINT uq_votes_presentation_id_request_key UNIQUE (presentation_id, request_key),
    CONSTRAINT fk_votes_presentation_id FOREIGN KEY(presentation_id) REFERENCES presentations (id),
    CONSTRAINT fk_votes_chosen_candidate_id FOREIGN KEY(chosen_candidate_id) REFERENCES candidates (id),
    CONSTRAINT fk_votes_rejected_candidate_id FOREIGN KEY(rejected_candidate_id) REFERENCES candidates (id)
);
CREATE TABLE rankings (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    presentation_id INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    verdict VARCHAR(16) NOT NULL,
    reason TEXT NOT NULL,
    ranks_json TEXT,
    dwell_ms INTEGER,
    created_at DOUBLE NOT NULL,
    request_key VARCHAR(200),
    CONSTRAINT uq_rankings_presentation_id_revision UNIQUE (presentation_id, revision),
    CONSTRAINT uq_rankings_presentation_id_request_key UNIQUE (presentation_id, request_key),
    CONSTRAINT fk_rankings_presentation_id FOREIGN KEY(presentation_id) REFERENCES presentations (id)
);
CREATE TABLE demonstrations (
    id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    presentation_id INTEGER NOT NULL,
    prompt_id INTEGER NOT NULL,
    rater_id INTEGER NOT NULL,
    text TEXT NOT NULL,
    revision INTEGER NOT NULL,
    created_at DOUBLE NOT NULL,
    request_key VARCHAR(200),
    CONSTRAINT uq_demonstrations_presentation_id_revision UNIQUE (presentation_id, revision),
    CONSTRAINT uq_demonstrations_presentation_id_request_key UNIQUE (presentation_id, request_key),
    CONSTRAINT fk_demonstrations_presentation_id FOREIGN KEY(presentation_id) REFERENCES presentations (id),
    CONSTRAINT fk_demonstrations_prompt_id FOREIGN KEY(prompt_id) REFERENCES prompts (id),
    CONSTRAINT fk_demonstrations_rater_id FOREIGN KEY(rater_id) REFERENCES raters (id)
);
CREATE TABLE policy_versions (
    version INTEGER NOT NULL,
    created_at DOUBLE NOT NULL,
    parent INTEGER,
    path TEXT NOT NULL,
    heldout_accuracy DOUBLE,
    win_rate DOUBLE,
    win_rate_low DOUBLE,
    win_rate_high DOUBLE,
    num_votes INTEGER NOT NULL,
    kl DOUBLE,
    accepted BOOLEAN NOT NULL,
    serving BOOLEAN NOT NULL,
    note TEXT NOT NULL,
    CONSTRAINT pk_policy_versions PRIMARY KEY (version)
);
INSERT INTO alembic_version VALUES ('votes_0001');
